"""Settings of a run: which domain is unseen, where the run is computed, and what is kept of it."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from fedsim.common.files import of_home
from fedsim.settings.attackers import checked
from fedsim.settings.effect import Above, Only
from fedsim.settings.sections import Settings, folder_name

NO_TARGET = "no-target"  # the unseen domain of a run in which all domains train


class RunSettings(Settings):
    """[run]: which domain is unseen, where the run is computed, what is kept, and what follows a client's failure."""

    target: str = Field("", description="the unseen domain; empty: the last one; no-target: none, all domains train")
    seed: int = Field(0, ge=0)
    label: Annotated[str, AfterValidator(folder_name)] = Field(
        "", description="text that distinguishes this run from other runs of the same method; a sweep's grid sets it"
    )
    runtime: Literal["inline", "ray", "flower", "deployment"] = Field(
        "inline",
        description="where clients run: in this process, on Ray workers, in Flower's own simulation engine, or "
        "on the machines of a federation",
    )
    federation: Annotated[str, Only(runtime="deployment")] = Field("", description="the deployment's federation file")
    evaluate_target: Literal["auto", "server", "site"] = Field(
        "auto",
        description="where the unseen domain's images are: on the server, or on a site with role = target; "
        "auto: on such a site if the federation file has one, otherwise on the server",
    )
    wait_for_sites: Annotated[float, Only(runtime="deployment")] = Field(
        300.0, gt=0, description="seconds to wait for sites that are not online"
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(
        1,
        ge=0,
        le=10_000,
        description="CPU threads of each process that computes; a run's numbers depend on it, so it is recorded and "
        "compared; 0: one for each core that the process may use (each site of a deployment counts its own cores)",
    )
    processes: int = Field(
        0,
        ge=0,
        description="number of processes in which clients train with the inline runtime; it does not change a run's "
        "numbers; 0: after the first round, one for each free core if that saves time",
    )
    output: Annotated[str, AfterValidator(lambda path: str(of_home(path)) if path.startswith("~") else path)] = (
        "outputs"
    )
    keep_predictions: bool = Field(
        True, description="keep the target's predictions of the selected, last and oracle round, for `compare --metric`"
    )
    evaluate_batch_size: int = Field(
        256,
        ge=1,
        description="images in one pass of an evaluation; an inference rule that looks at several images together "
        "(its field `batch`) gets that number or a multiple of it",
    )
    checkpoint_every: int = Field(
        0,
        ge=0,
        description="number of rounds from one checkpoint to the next; 0: after a round that ends a second or more "
        "after the last checkpoint, and after every round where a repeated one costs privacy or other machines' time",
    )
    validation_domain: str = Field(
        "",
        description="a domain that is held out to select the round: no client trains on it, and the server evaluates "
        "it like the unseen one; empty: the source clients' own validation images select the round",
    )
    select_on: Literal["aggregated", "local"] = Field(
        "aggregated",
        description="the validation that selects the round: of the aggregated model, or the mean of the local models",
    )
    select_by: Literal["primary", "loss", "macro_f1", "auroc"] = Field(
        "primary",
        description="the metric of the validation that selects the round: the task's own (accuracy, Dice), the loss, "
        "or for classes the macro F1 or the AUROC, which clients then measure too",
    )
    client_rows: Literal["auto", "clients", "domains"] = Field(
        "auto",
        description="rows of a round in clients.csv: one per client, one per domain, or (auto) one per domain if "
        "more than 200 clients take part",
    )
    personalised: bool = Field(
        False,
        description="source clients also validate the model with the tensors that they keep to themselves "
        "(personal_accuracy in clients.csv)",
    )
    record: list[Literal["alpha", "classes", "local_models"]] = Field(
        [],
        description="what a run records besides the rest, for figures of papers: alpha of each test image in each "
        "layer, the training images of each client by class, and each client's trained model on every domain",
    )
    keep_personal: bool = Field(
        False, description="write every client's own model to personal-<client>.safetensors; a site's model stays there"
    )
    attackers: Annotated[dict[str, str], AfterValidator(checked)] = Field(
        {},
        description="clients or domains of a simulation that lie, and how: label_flip, label_shift(l), sign_flip(s), "
        "scaled(s), noise(s), alie(z), mimic(client), drift(c), or none; every table says so",
    )
    keep_state: bool = Field(
        False,
        description="keep the checkpoint and the clients' states when the run has ended, so that it can go on with a "
        "larger train.rounds",
    )
    doubt: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="alpha: at its end the run fits a temperature and sets of classes to the sources' validation "
        "examples, of which this share may miss the true class (docs/doubt.md); 0: nothing is fitted",
    )
    on_client_failure: Literal["stop", "continue"] = "stop"
    patience: float = Field(
        600.0,
        ge=0,
        description="seconds to wait for a site after its connection broke, and to ask it again, before its reply "
        "counts as lost",
    )
    update_limit: float = Field(
        100.0,
        ge=0,
        description="a reply is refused when it moves the model more than this many times as far as the median of the "
        "other replies, and of two replies both are; 0: no reply is refused",
    )
    examples_limit: float = Field(
        100.0,
        ge=0,
        description="a site is refused when it reports more than this many times the median number of examples of the "
        "other sites; 0: every number is accepted",
    )
    timeout: Annotated[float, Only(runtime=("ray", "flower", "deployment")), Only(processes=Above(1))] = Field(
        3600.0,
        gt=0,
        description="seconds to wait for the replies of one phase; with the inline runtime it holds only where it is "
        "set and run.processes is above 1, because a process that is late can be ended",
    )
    ray_address: Annotated[str, Only(runtime="ray")] = Field(
        "", description="address of an existing Ray cluster; empty: a local cluster is started"
    )
    workers: Annotated[int, Only(runtime="ray")] = Field(
        0,
        ge=0,
        description="Ray workers; 0: as many as the resources allow, at most one per client; the inline runtime has "
        "run.processes",
    )
    cpus_per_worker: Annotated[float, Only(runtime=("ray", "flower"))] = Field(1.0, gt=0)
    gpus_per_worker: Annotated[float, Only(runtime=("ray", "flower"))] = Field(
        0.0, ge=0, description="GPUs of a Ray worker, e.g. 0.5; 0: workers share all GPUs"
    )
    tensorboard: bool = Field(False, description="also write TensorBoard scalars into the run's folder")
    callbacks: list[str] = Field([], description="trackers: wandb, mlflow, or your own as package.module:Class")
