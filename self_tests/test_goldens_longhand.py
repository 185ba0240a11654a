"""Goldens are held against the longhand oracles too, which had no part in writing them."""

from __future__ import annotations

import numpy as np
import pytest

from goldens.regenerate import FOLDER
from moe_conformance import goldens
from self_tests.goldens_longhand import packed_rows, packing
from self_tests.oracles.agreement import assert_close

LONGHAND = {"packed_rows": packed_rows, "packing": packing}


@pytest.mark.parametrize("name", LONGHAND)
class TestLonghand:
    def test_what_is_stored_is_what_the_longhand_gives(self, name):
        """From the stored inputs: whole numbers exactly, real ones up to rounding, in the stored shapes."""
        stored = goldens.read(FOLDER, name)
        given = {key: tensor.numpy() for key, tensor in stored.items() if "/in/" in key}
        for key, expected in LONGHAND[name].work_out(given).items():
            actual = stored[key]
            if actual.is_floating_point():
                assert_close(expected, actual)
            else:
                assert (np.shape(expected), np.asarray(expected, np.int64).tolist()) == (actual.shape, actual.tolist())

    def test_the_longhand_gives_all_but_what_it_says(self, name):
        """Every stored output that no second oracle gives is named."""
        stored = goldens.read(FOLDER, name)
        given = {key: tensor.numpy() for key, tensor in stored.items() if "/in/" in key}
        outputs = {key for key in stored if "/out/" in key}
        assert {*LONGHAND[name].UNANSWERED} == outputs - set(LONGHAND[name].work_out(given))
