"""The laws by name: what each entry of laws.json is called, and where it is printed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LawName:
    """One entry of laws.json."""

    name: str
    title: str  # on the page
    table: str | None = None  # heading of the text table that holds it; laws may share one
    per_budget: bool = False  # an optimum at each budget, rather than a law through them
    percent: bool = False  # a share
    column: str | None = None  # of the summary, where an optimum and the law through it share one


STUDY_RECIPE = "study_recipe"  # what a plan forecasts by; the others are named where they are fitted

# A new law is a line here and the estimator in `laws` that gives it. In the order in which laws are printed.
LAW_NAMES = {
    law.name: law
    for law in (
        LawName("share_optimum", "s*", "Embedder share s* (%)", per_budget=True, percent=True, column="s*"),
        LawName("share_law", "s*(C)", "s*(C)", column="s*"),
        LawName(
            "depth_optimum",
            "depth axis: best share",
            "Depth axis: s* of the parabola (%)",
            per_budget=True,
            percent=True,
        ),
        LawName("critical_batch", "critical batch", "Critical batch size", column="B_crit"),
        LawName("critical_batch_fixed_pool", "critical batch, candidates of a fixed pool", "Critical batch size"),
        LawName(
            "batch_size_optimum", "B* at equal compute", "Batch size B* at equal compute", per_budget=True, column="B*"
        ),
        LawName("batch_size_law", "B*(C)", "B*(C)", column="B*"),
        LawName("size_optimum", "N*", "Model size N*: valleys of one shape", per_budget=True, column="N*"),
        LawName("size_parabola", "N* by parabola", "Model size N*: parabolas", per_budget=True),
        LawName("size_law", "N*(C)", "Allocation laws", column="N*"),
        LawName("size_law_parabola", "N*(C) by parabolas", "Allocation laws"),
        LawName("rate_response", "learning rate as a covariate", "Learning rate as a covariate"),
        LawName("size_test", "does the metric want another N* than the loss?", "Sizes by metric and by loss"),
        LawName("size_law_grid", "N*(C) on the grid"),
        LawName("data_law", "D*(C) as realised", "Allocation laws"),
        LawName("data_law_6nd", "D*(C) by C/6N", "Allocation laws"),
        LawName("data_law_grid", "D*(C) on the grid"),
        LawName("loss_law", "L*(C) along the frontier", "Loss laws", column="L*(C)"),
        LawName("surface", "surface L(N, D)", "Loss laws"),
        LawName("surface_optimum_10x", "surface L(N, D) at ten times the budget", "Loss laws"),
        LawName("surface_optimum_executed_10x", "the same by executed FLOPs, ten times their largest", "Loss laws"),
        LawName("both_approaches", "two approaches to N*", "Loss laws"),
        LawName("recipe_surface", "law over all knobs of a recipe", "One law of the recipe", column="recipe"),
        LawName("recipe_exponents", "how the best recipe moves with compute", "One law of the recipe", column="recipe"),
        LawName("recipe_optimum", "best recipe of a budget", "One law of the recipe", column="recipe"),
        LawName("recipe_optimum_executed", "best recipe by executed FLOPs", "One law of the recipe"),
        LawName(STUDY_RECIPE, "law over size, share, data, batch and rate", "One law of the recipe", column="recipe"),
        LawName("finite_log", "law of a finite log", "A log that ends: metric over N, unique events and passes"),
        LawName("negatives_optimum", "K*", "Negatives K*", per_budget=True, column="K*"),
        LawName("negatives_law", "K*(C)", "K*(C)", column="K*"),
        LawName("negatives_shared_alpha_optimum", "K*, shared exponent"),
        LawName("negatives_shared_alpha_law", "K*(C), shared exponent", "K*(C)"),
        LawName("context_optimum", "L* of the window", "Window length L* (events)", per_budget=True, column="window"),
        LawName("context_law", "L*(C) of the window", "L*(C) of the window", column="window"),
        LawName("context_gain", "history that is enough", "History within 1% of the longest", per_budget=True),
        LawName("shape_optimum", "best shape, six knobs at once", "Shape: six knobs at once", column="shape"),
        LawName("shape_surface", "surface over six knobs", "Shape: six knobs at once", column="shape"),
        LawName("shape_centre", "one knob at a time against all at once", "Shape: six knobs at once"),
        LawName(
            "regularised_share",
            "s* with dropout in the embedder",
            "Share with dropout in the embedder",
            column="dropout",
        ),
    )
}
