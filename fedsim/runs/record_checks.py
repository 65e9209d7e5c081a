"""What refuses the settings of `run.record`, each in one line."""

from collections.abc import Mapping

from fedsim.common.errors import UserError
from fedsim.parts.part import part_name
from fedsim.runs.plan import Plan
from fedsim.settings.experiment import Experiment
from strategies.parts import Place


def refuse_records(plan: Plan) -> None:
    """Raises UserError where a run cannot record what `run.record` asks for."""
    run, recipe = plan.experiment.run, plan.recipe
    if "alpha" in run.record and "alpha" not in recipe.infer.quantities:
        raise UserError(
            "run.record = 'alpha' needs an inference rule with an alpha for each image (zero_shot_adapter, that of "
            f"fedig-a); {plan.experiment.method_name} has {part_name(recipe.infer)}"
        )
    for name in ("alpha", "local_models"):
        if name in run.record and run.runtime == "deployment":
            raise UserError(f"run.record = {name!r} reads the images of domains on the server, which sites keep; it is "
                            "of simulations alone")  # fmt: skip
    if "local_models" in run.record and recipe.fuse.masked:
        raise UserError(f"run.record = 'local_models' looks at single clients' models, which {part_name(recipe.fuse)} "
                        "hides from the server")  # fmt: skip


def refuse_local_tensors(experiment: Experiment, places: Mapping[str, Place]) -> None:
    """Raises UserError where `run.record` asks for clients' models, of which they keep tensors to themselves."""
    local = [name for name, place in places.items() if place == "local"]
    if "local_models" in experiment.run.record and local:
        raise UserError(
            f"run.record = 'local_models' needs all tensors of a client's model, and clients of "
            f"{experiment.method_name} keep {len(local)} to themselves ({local[0]}, ...)"
        )
