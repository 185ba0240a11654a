"""Where tokens go, as a backend counts it, held against the oracle; and which groups it takes for local."""

from __future__ import annotations

import torch

from moe_conformance.judging.compare.tensors import judge_tensor
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.script import values
from moe_conformance.judging.verdict import Tally, WrongCount, WrongForm, WrongGroups
from moe_conformance.reference.groups.rules import is_local
from moe_conformance.reference.token_exchange.dispatch_layout import dispatch_layout
from moe_conformance.scenarios.outcome import Outcome

_ROWS = {"in_rank_TW": "token", "per_rank_W": "rank", "per_node_D": "node", "per_expert_E": "expert"}
_WORDS = {
    "in_rank_TW": "the ranks that a token goes to",
    "per_rank_W": "the tokens for every rank",
    "per_node_D": "the tokens for every node",
    "per_expert_E": "the slots for every expert",
}


def judge_dispatch_layout(outcome: Outcome, tally: Tally) -> None:
    """Decide whether a layout says where every token goes, and counts what goes to every rank, node and expert.

    Raises:
        WrongForm: a table of another shape, or of numbers that are none: booleans for ranks, integers for counts.
        WrongCount: a token goes elsewhere, or a count is another.
    """
    given = outcome.workload.calls[0].given[0]
    expected = dispatch_layout(given["ids_TK"], given["owner_E"].tolist(), given["node_of_W"].tolist())
    for name, row in _ROWS.items():
        (table,) = values(outcome, 0, name)
        wanted = "booleans" if name == "in_rank_TW" else "integers"
        kind = "booleans" if table.dtype == torch.bool else "floats" if table.is_floating_point() else "integers"
        if kind != wanted:
            raise WrongForm("dispatch", f"{_WORDS[name]} are {kind}, not {wanted}", ranks=(0,))
        right = getattr(expected, name)
        judge_tensor(table, right, tally, error=WrongCount, stage="dispatch", what=_WORDS[name], row=row)


def judge_transport(outcome: Outcome, tally: Tally) -> None:
    """Decide whether groups are taken for local by the domains of their members.

    Raises:
        WrongForm: an answer is neither True nor False.
        WrongGroups: a group is taken for local that spans domains, or the other way round.
    """
    findings = []
    for number, call in enumerate(outcome.workload.calls):
        given = call.given[0]
        members, domains = given["members"], given["domain_of"]
        (answer,) = values(outcome, number)
        right = is_local(members, domains)
        if not isinstance(answer, bool):
            raise WrongForm("groups", f"whether ranks {list(members)} are local is answered by {answer!r}", ranks=(0,))
        if answer is not right:
            spans = sorted({domains[rank] for rank in members})
            sentence = (
                f"ranks {list(members)}, each of which sees {given['visible_devices']} devices, are "
                f"{'local' if answer else 'not local'}, and their domains are {', '.join(spans)}"
            )
            findings.append(Finding(f"local {answer}", sentence, (0,)))
        tally.add(elements=1, rank=0)
    if findings:
        fail(WrongGroups, "groups", findings)
