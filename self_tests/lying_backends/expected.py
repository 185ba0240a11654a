"""What detects each lying backend: a requirement, a layout, a workload, and words of the sentence."""

from __future__ import annotations

from self_tests.lying_backends import lying, lying_costs
from self_tests.lying_backends import lying_routers as routers
from self_tests.planted_bugs.plant import EP2, EP2_EDP2, EP2_ETP2, TP2_EP2

LIARS = [
    (lying.WrongCounts, "EXCH-04", EP2, "even", "for expert 0 and delivers"),
    (lying.WrongPlace, "EXCH-03", EP2, "even", "has no routing weight"),
    (lying.WrongWire, "COST-04", EP2, "even", "rows; needed: "),
    (lying_costs.ThriceAsCopies, "COST-04", EP2, "even", "claims wire = 'copies', and rank 0 gathers its"),
    (
        lying_costs.ThriceAsCopies,
        "COST-04",
        TP2_EP2,
        "even",
        "its tokens 0 times over 2 tp ranks in microbatch 0",
    ),
    (lying_costs.ThriceAsCapacity, "COST-04", EP2, "one-expert-even", "claims wire = 'capacity', which is"),
    (lying_costs.SaysStatic, "COST-10", EP2, "uneven", "claims handed = 'static', and ranks 0, 1 deliver"),
    (routers.ChoicesUnsaid, "DROP-06", EP2, "capacity-tight-position", "by design claims drop_order = 'choices'"),
    (lying.CapacityUnsaid, "PACK-13", EP2, "uneven", "to every expert by design claims wire = 'capacity'"),
    (lying.CapacityUnsaid, "COST-03", EP2, "uneven", "sends every rank's capacity to every expert"),
    (lying.AsksTwice, "PACK-13", EP2, "uneven", "2 times instead of 1"),
    (
        routers.NoiseUnsaid,
        "ROUTE-01",
        EP2,
        "route-softmax",
        "adds noise in training by design claims noise = 'training'",
    ),
    (routers.AlwaysNoisy, "ROUTE-01", EP2, "route-softmax", "is there in evaluation mode too"),
    (routers.AlwaysNoisy, "GRAD-18", EP2, "layer-even", "y of rank 0 token"),
    (routers.SaysFloat32, "GROUP-07", EP2_EDP2, "proxy-even", "routers claim dtype = torch.float32, and all outputs"),
    (lying.SaysSpread, "EXCH-41", EP2, "spoilt-tokens-even", "the token is finite, and rank"),
    (routers.SaysChoices, "DROP-06", EP2, "capacity-tight-position", "does not claim drop_order = 'choices'"),
    (routers.ScoresUnsaid, "DROP-05", EP2, "capacity-biased", "by design claims drop_by = 'scores'"),
    (routers.SaysScores, "DROP-05", EP2, "capacity-biased", "by design does not claim drop_by = 'scores'"),
    (routers.DownUnsaid, "DROP-01", EP2, "capacity-fraction", "by design claims capacity_rounding = 'down'"),
    (routers.SaysDown, "DROP-01", EP2, "capacity-fraction", "by design does not claim capacity_rounding = 'down'"),
    (routers.KeptUnsaid, "DROP-09", EP2, "capacity-normalised", "by design claims normalised_over = 'kept'"),
    (routers.SaysKept, "DROP-09", EP2, "capacity-normalised", "does not claim normalised_over = 'kept'"),
    (routers.ScoresUnsaid, "DROP-09", EP2, "layer-dropped-normalised-even", "by design claims drop_by = 'scores'"),
    (routers.DownUnsaid, "DROP-09", EP2, "layer-dropped-even", "by design claims capacity_rounding = 'down'"),
    (routers.KeptUnsaid, "DROP-09", EP2, "layer-dropped-normalised-even", "claims normalised_over = 'kept'"),
    (routers.SaysChoices, "DROP-09", EP2, "layer-dropped-position-even", "does not claim drop_order = 'choices'"),
    (lying.WireUnsaid, "COST-03", EP2, "top-1-even", "sends all tokens to all ranks by design claims wire = 'all'"),
    (lying.UnknownClaim, "EXCH-01", EP2, "even", "Malformed: Claims.wire is 'token'; allowed: 'pairs', 'tokens'"),
    (lying.ClaimShown, "EXCH-01", EP2, "even", "no check reads claims there; use claims = Claims(wire=...)"),
    (lying.ClaimsDisagree, "SHARE-01", EP2, "shared-even", "two surfaces claim wire = 'all' and 'tokens'"),
    (lying.HidesParts, "EXCH-05", EP2_ETP2, "even", "2.000 x the expected value"),
    (lying.ChangesInputs, "EXCH-08", EP2, "even", "changed its input x"),
    (lying.WrongDtype, "EXCH-07", EP2, "even", "has the dtype torch.float64"),
    (lying.WrongDtype, "EXCH-07", EP2, "own-even", "has the dtype torch.float64"),
    (lying.KeepsHandle, "EXCH-10", EP2, "halves-in-flight-even", "in combine:0"),
    (lying.CopyingWindows, "EXPT-02", EP2, "own-even", "is a copy, not a view"),
    (lying.HidesParameter, "EXPT-02", EP2, "own-even", "have no window"),
    (lying.IgnoresConfig, "EXPT-03", EP2, "own-input-weights-even", "applied at the experts' output"),
    (lying.RefusesLate, "EXCH-09", EP2, "even", "not today"),
    (lying.WrongGroups, "GROUP-01", EP2_ETP2, "", "the ep group of rank 0"),
]
