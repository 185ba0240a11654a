"""Sums with a shared expert's output that touch what others hold, lose gradients, or work eagerly alone."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.backends.native.row_ops.combine_add import CombineAdd
from moe_conformance.backends.native.row_ops.scatter import ScatterAdd
from self_tests.planted_bugs.plant import SINGLE, Expectation, planted


@planted(
    Expectation("ALIAS-04", "combine-add-relations", "combine", "changed x, the input", "one tensor, grad off"),
    Expectation("ALIAS-05", "combine-add-relations", "combine", "one tensor, grad off", "expected: out of place"),
    layout=SINGLE,
)
class InPlaceWithoutGrad(CombineAdd):
    """With grad off it adds in place, although a shared expert may have returned its input."""

    def _in_place(self, out_ND: Tensor, kept: tuple[Tensor, ...]) -> bool:
        return not torch.is_grad_enabled() and out_ND.is_contiguous()


@planted(
    Expectation("ALIAS-04", "combine-add-relations", "combine", "changed x, the input", "views of one tensor"),
    layout=SINGLE,
)
class IdentityOfTheTensor(CombineAdd):
    """It compares the tensors by identity alone: a view of the input is another tensor."""

    def _in_place(self, out_ND: Tensor, kept: tuple[Tensor, ...]) -> bool:
        return not torch.is_grad_enabled() and out_ND.is_contiguous() and all(out_ND is not each for each in kept)


@planted(Expectation("ALIAS-05", "combine-add-relations", "combine", "overlapping by all rows but one"), layout=SINGLE)
class FirstAddresses(CombineAdd):
    """It compares the addresses of the first elements: views that overlap at another offset pass."""

    def _in_place(self, out_ND: Tensor, kept: tuple[Tensor, ...]) -> bool:
        apart = all(out_ND.data_ptr() != each.data_ptr() for each in kept)
        return not torch.is_grad_enabled() and out_ND.is_contiguous() and apart


@planted(Expectation("ALIAS-05", "combine-add-relations", "combine", "overlapping in memory of NumPy"), layout=SINGLE)
class FirstAddressesOfStorages(CombineAdd):
    """It compares the addresses of the storages: two storages over slices of one NumPy array pass."""

    def _in_place(self, out_ND: Tensor, kept: tuple[Tensor, ...]) -> bool:
        starts = {each.untyped_storage().data_ptr() for each in kept}
        alone = out_ND.untyped_storage().data_ptr() not in starts
        return not torch.is_grad_enabled() and out_ND.is_contiguous() and alone


@planted(
    Expectation("ALIAS-05", "combine-add-relations-gradients", "combine", "grad on", "expected: out of place"),
    Expectation("ALIAS-06", "combine-add-gradients", "run", "raised"),
    layout=SINGLE,
)
class InPlaceWithGrad(CombineAdd):
    """It adds in place with grad on, where autograd has saved the output or it is a leaf."""

    def _in_place(self, out_ND: Tensor, kept: tuple[Tensor, ...]) -> bool:
        return out_ND.is_contiguous() and all(out_ND is not each for each in kept)


@planted(
    Expectation("ALIAS-06", "combine-add-gradients", "combine", "the gradient of out_ND is missing"), layout=SINGLE
)
class DetachedOutput(CombineAdd):
    """The output of the shared expert is detached before routed rows are added to it."""

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor, x_ND: Tensor) -> Tensor:
        """Detach."""
        return super().add(out_ND.detach(), index_J, src_JD, x_ND)


@planted(Expectation("ALIAS-06", "scatter-gradients", "combine", "the gradient of out_ND is"), layout=SINGLE)
class SavedOutputOverwritten(ScatterAdd):
    """The sum is written into the data of an output that autograd has saved, behind its version counter."""

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Write into the data, and return what looks like a sum to autograd."""
        y_ND = super().add(out_ND, index_J, src_JD)
        out_ND.data.copy_(y_ND.detach())
        return y_ND


@planted(
    Expectation("ALIAS-07", "scatter-grad-modes", "combine", "under no_grad, the result asks for a gradient"),
    layout=SINGLE,
)
class GradSwitchedOn(ScatterAdd):
    """Gradients are switched on for the sum, whatever the caller has asked for."""

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Record always."""
        with torch.enable_grad():
            return super().add(out_ND, index_J, src_JD)


@planted(Expectation("ALIAS-07", "combine-add-grad-modes", "run", "add:3", "does not require grad"), layout=SINGLE)
class AnyModeOfNoGrad(CombineAdd):
    """Nothing is recorded inside of any no_grad, although an enable_grad inside of it says otherwise."""

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor, x_ND: Tensor) -> Tensor:
        """Remember the first no_grad of the script, as a setting that is read once would."""
        y_ND = super().add(out_ND, index_J, src_JD, x_ND)
        self.off = getattr(self, "off", False) or not torch.is_grad_enabled()
        return y_ND.detach() if self.off else y_ND


@planted(
    Expectation("ALIAS-07", "combine-add-grad-modes", "combine", "under no_grad, add gives other bits"), layout=SINGLE
)
class AnotherSumWithoutGrad(CombineAdd):
    """Without gradients rows are added one after the other instead of in one sum: other bits."""

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor, x_ND: Tensor) -> Tensor:
        """Take another path where grad is off."""
        if torch.is_grad_enabled():
            return super().add(out_ND, index_J, src_JD, x_ND)
        return out_ND.index_add(0, index_J.flip(0), src_JD.flip(0))


@planted(
    Expectation("ALIAS-08", "scatter-deterministic-setting", "combine", "that succeeded left", "(True, False)"),
    layout=SINGLE,
)
class SettingLeftOn(ScatterAdd):
    """Deterministic algorithms are asked for, and the setting is not put back."""

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Ask and forget."""
        torch.use_deterministic_algorithms(True)
        return super().add(out_ND, index_J, src_JD)


@planted(Expectation("ALIAS-08", "scatter-deterministic-setting", "combine", "that raised left"), layout=SINGLE)
class SettingLeftAfterAnError(ScatterAdd):
    """The setting is put back behind the sum, but not where the sum raises."""

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Put it back without a finally."""
        enabled, warn = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.use_deterministic_algorithms(True)
        y_ND = super().add(out_ND, index_J, src_JD)
        torch.use_deterministic_algorithms(enabled, warn_only=warn)
        return y_ND


@planted(
    Expectation("ALIAS-08", "combine-add-deterministic-setting", "combine", "that succeeded left", "(True, True)"),
    layout=SINGLE,
)
class WarnOnlyForgotten(CombineAdd):
    """The setting is put back without its second half, that others are only warned of."""

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor, x_ND: Tensor) -> Tensor:
        """Put back half of it."""
        enabled = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            return super().add(out_ND, index_J, src_JD, x_ND)
        finally:
            torch.use_deterministic_algorithms(enabled)


@planted(Expectation("ALIAS-09", "scatter-without-data", "run", "raised"), layout=SINGLE)
class ReadsOneNumber(ScatterAdd):
    """Whether there is anything to add is read from a value: a tensor without data has none."""

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Look whether any index is above 0."""
        return super().add(out_ND, index_J, src_JD) if int(index_J.sum()) >= 0 else out_ND.clone()


@planted(
    Expectation("ALIAS-09", "combine-add-without-data", "combine", "the dtype of the result of add is torch.float32"),
    layout=SINGLE,
)
class WiderWithoutData(CombineAdd):
    """On tensors without data the result has the dtype in which sums are kept."""

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor, x_ND: Tensor) -> Tensor:
        """Widen where nothing is computed."""
        y_ND = super().add(out_ND, index_J, src_JD, x_ND)
        return y_ND.float() if out_ND.untyped_storage().device.type == "meta" else y_ND


@planted(
    Expectation("ALIAS-10", "scatter-compiled", "combine", "compiled as one graph", "gives other values"), layout=SINGLE
)
class SourcesOnceWhileTraced(ScatterAdd):
    """While a program is traced, rows with the same index are assigned instead of added."""

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
        """Assign where a compiler looks."""
        if torch.compiler.is_compiling():
            return out_ND.index_put((index_J,), out_ND[index_J] + src_JD)
        return super().add(out_ND, index_J, src_JD)


@planted(
    Expectation("ALIAS-10", "combine-add-compiled", "combine", "compiled as one graph", "another gradient"),
    layout=SINGLE,
)
class DetachedWhileTraced(CombineAdd):
    """While a program is traced, source rows are detached."""

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor, x_ND: Tensor) -> Tensor:
        """Detach where a compiler looks."""
        traced = torch.compiler.is_compiling()
        return super().add(out_ND, index_J, src_JD.detach() if traced else src_JD, x_ND)


@planted(Expectation("ALIAS-09", "combine-add-exported", "combine", "export"), layout=SINGLE)
class SourcesHalvedInExport(CombineAdd):
    """While a program is exported, source rows are scaled down, and nothing scales them back."""

    def add(self, out_ND: Tensor, index_J: Tensor, src_JD: Tensor, x_ND: Tensor) -> Tensor:
        """Scale where a program is made."""
        return super().add(out_ND, index_J, src_JD / 2 if torch.compiler.is_exporting() else src_JD, x_ND)
