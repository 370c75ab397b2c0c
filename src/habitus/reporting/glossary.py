"""The words of the page, each in a line or two; docs/words.md says the same."""

WORDS: tuple[tuple[str, str], ...] = (
    ("slot", "one place in a training window, whether or not an event fills it. D counts slots seen in training."),
    ("N, D, C", "parameters without vocabulary tables, slots seen, and FLOPs; a star, as in N*, marks the best one."),
    ("budget", "the FLOPs that a run may spend in training, counted by Equation 1; the C of every law."),
    (
        "Equation 1",
        "FLOPs of stage 1 = 6·D·(t·p_e + p + 3·B·L·h): embedder p_e on t text tokens, contextualizer p, and scoring "
        "every slot of a batch of B windows of L slots against all others at width h, joint_dim.",
    ),
    ("6ND", "the usual shorthand C = 6·N·D. Equation 1 charges more, so D = C/(6N) is more than a budget pays."),
    ("cell", "one setting of a sweep: sizes, batch, K and budget. Its runs differ in learning rate and seed only."),
    ("share, s", "the embedder's part of the parameters, p_e/N."),
    ("joint_dim, h", "the width in which items and histories meet: of the embedder, of an event and of scoring."),
    (
        "B, B_crit",
        "windows per step, and the critical batch: where S = S_min·(1 + B_crit/B) steps are twice the least.",
    ),
    ("regime", "whom a target is ranked against: 'batch', the targets of its batch; 'catalogue', all items."),
    ("K", "extra negatives per step of stage 2, drawn from the catalogue. The small k of recall@k is a cut-off."),
    (
        "stage 1, stage 2",
        "training both parts together; then the contextualizer alone, on frozen item vectors, with K negatives.",
    ),
    ("law", "a fitted curve with intervals and a status: it is identified, or says why these runs do not tell."),
)
