"""Settings of a run: what is held out, where it is computed, what is kept."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from fedsim.sections import Settings, folder_name


class RunSettings(Settings):
    """[run]: what is held out, where it runs, what happens when a client fails."""

    target: str = Field("", description="the unseen domain; empty: the last one")
    seed: int = Field(0, ge=0)
    label: Annotated[str, AfterValidator(folder_name)] = Field(
        "", description="text that distinguishes this run from other runs of the same method; a grid of a sweep sets it"
    )
    runtime: Literal["inline", "ray", "flower", "deployment"] = Field(
        "inline",
        description="this process, Ray workers, Flower's own simulation engine, or a federation's own machines",
    )
    federation: str = Field("", description="the deployment's federation file")
    evaluate_target: Literal["auto", "server", "site"] = Field(
        "auto",
        description="where the unseen domain's images are: on the server, or on a site with role = target; "
        "auto: the site when the federation file has one, else the server",
    )
    wait_for_sites: float = Field(300.0, gt=0, description="seconds to wait for sites that are not online")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(
        1,
        ge=0,
        description="CPU threads of each process that computes; numbers depend on it, so that it is recorded and "
        "compared; 0: one for each core that the process may use (each site of a deployment counts its own)",
    )
    processes: int = Field(
        0,
        ge=0,
        description="processes of the inline runtime in which clients train, with the same numbers; 0: after the first "
        "round, as many as cores are free when that saves time",
    )
    output: str = "outputs"
    keep_predictions: bool = Field(
        True, description="keep the target's predictions of the selected, last and oracle round, for `compare --metric`"
    )
    evaluate_batch_size: int = Field(256, ge=1)
    checkpoint_every: int = Field(1, ge=1, description="rounds between checkpoints")
    validation_domain: str = Field(
        "",
        description="a domain that is held out to select the round: no client trains on it, and the server evaluates "
        "it like the unseen one; empty: the source clients' own validation images select the round",
    )
    select_on: Literal["aggregated", "local"] = Field(
        "aggregated",
        description="the validation that selects the round: of the aggregated model, or the mean of the local models",
    )
    client_rows: Literal["auto", "clients", "domains"] = Field(
        "auto",
        description="rows of a round in clients.csv: one per client, one per domain, or (auto) per domain where "
        "more than 200 clients take part",
    )
    personalised: bool = Field(
        False, description="source clients also validate with their own batch norm (clients.csv)"
    )
    keep_personal: bool = Field(
        False, description="write every client's own model to personal-<client>.safetensors; sites keep theirs"
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
        description="a reply is refused when it moves the model more than so many times as far as the median of the "
        "others; 0: none is refused",
    )
    examples_limit: float = Field(
        100.0,
        ge=0,
        description="a site is refused when it reports more than so many times the examples of the others' median; "
        "0: every number is accepted",
    )
    timeout: float = Field(3600.0, gt=0, description="seconds to wait for the replies of one phase")
    ray_address: str = Field("", description="existing Ray cluster; empty: a local one is started")
    workers: int = Field(0, ge=0, description="Ray workers; 0: as many as the resources allow, at most one per client")
    cpus_per_worker: float = Field(1.0, gt=0)
    gpus_per_worker: float = Field(0.0, ge=0, description="fraction of a GPU; 0: Ray workers share all GPUs that exist")
    tensorboard: bool = Field(False, description="also write TensorBoard scalars into the run's folder")
    callbacks: list[str] = Field([], description="your own trackers, package.module:Class (see RunCallback)")
