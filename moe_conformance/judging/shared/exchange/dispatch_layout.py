"""Judges of dispatch layouts: destinations of tokens, counts, and which groups are local."""

from __future__ import annotations

import torch

from moe_conformance.judging.compare.tensors import judge_tensor
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding
from moe_conformance.judging.observed.script import values
from moe_conformance.judging.verdict import Tally, WrongCount, WrongForm, WrongGroups
from moe_conformance.reference.groups.rules import is_local
from moe_conformance.reference.token_exchange.dispatch_layout import dispatch_layout
from moe_conformance.scenarios.outcome import Outcome

_ROWS = {"in_rank_TW": "token", "per_rank_W": "rank", "per_node_D": "node", "per_expert_E": "expert"}
_WORDS = {
    "in_rank_TW": "the destination ranks of the tokens (in_rank)",
    "per_rank_W": "the tokens per rank (per_rank)",
    "per_node_D": "the tokens per node (per_node)",
    "per_expert_E": "the slots per expert (per_expert)",
}


def judge_dispatch_layout(outcome: Outcome, tally: Tally) -> None:
    """Decide whether a layout has the correct destination ranks of every token and counts per rank, node, expert.

    Raises:
        WrongForm: a table of another shape or kind: booleans for ranks, integers for counts.
        WrongCount: a token has another destination, or a count is wrong.
    """
    given = outcome.workload.calls[0].given[0]
    expected = dispatch_layout(given["ids_TK"], given["owner_E"].tolist(), given["node_of_W"].tolist())
    for name, row in _ROWS.items():
        (table,) = values(outcome, 0, name)
        wanted = "booleans" if name == "in_rank_TW" else "integers"
        kind = "booleans" if table.dtype == torch.bool else "floats" if table.is_floating_point() else "integers"
        if kind != wanted:
            raise WrongForm("dispatch", f"{_WORDS[name]} are {kind} instead of {wanted}", ranks=(0,))
        right = getattr(expected, name)
        judge_tensor(table, right, tally, error=WrongCount, stage="dispatch", what=_WORDS[name], row=row)


@judge(WrongGroups, "groups")
def judge_transport(outcome: Outcome) -> Comparisons:
    """Decide whether a group is reported as local if and only if its ranks are in one domain.

    Raises:
        WrongForm: `is_local` returned neither True nor False.
        WrongGroups: a group is reported as local that spans domains, or the other way round.
    """
    for number, call in enumerate(outcome.workload.calls):
        given = call.given[0]
        members, domains = given["members"], given["domain_of"]
        (answer,) = values(outcome, number)
        right = is_local(members, domains)
        if not isinstance(answer, bool):
            sentence = f"is_local of ranks {list(members)} returned {answer!r} instead of True or False"
            raise WrongForm("groups", sentence, ranks=(0,))
        if answer is not right:
            spans = sorted({domains[rank] for rank in members})
            sentence = (
                f"is_local of ranks {list(members)}, with {given['visible_devices']} visible devices each, returned "
                f"{answer} instead of {right}: their domains are {', '.join(spans)}"
            )
            yield Finding(f"local {answer}", sentence, (0,))
        yield Comparison(0, elements=1)
