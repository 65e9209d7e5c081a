"""What a run says before the first round, its environments and plan, and settings on which nothing depends."""

import json

import pytest
from flwr.app import Context, RecordDict
from image_trees import write_tree
from support import interrupt, numbers, run_small, small_experiment, tiny_experiment

from fedsim.analysis import compare
from fedsim.apps.client import node_clients
from fedsim.common.errors import UserError
from fedsim.data.catalog import BENCHMARKS
from fedsim.methods.recipe import Recipe
from fedsim.methods.table import METHODS
from fedsim.models import build_model
from fedsim.records import read_runs
from fedsim.records.environment import earlier_environments
from fedsim.runs import session
from fedsim.runs.no_effect import data_facts, no_effect_notes, share_notes
from fedsim.runs.notes import data_notes, few_client_notes, weight_notes
from fedsim.runs.plan import resolve
from fedsim.runs.traffic import traffic
from fedsim.runs.work import budget_notes
from fedsim.settings import DataSettings, ModelSettings
from fedsim.settings.effect import Size, Trait
from fedsim.settings.experiment import Experiment, read_experiment


def test_a_run_says_and_records_it(tmp_path, caplog):
    root = write_tree(tmp_path / "tree", ("a", "b"), ("cat", "dog"), 6)
    write_tree(tmp_path / "tree", ("c",), ("cat", "emu"), 7, seed=100)
    data = {"dataset": "folder", "root": str(root), "domains": [], "classes": ["cat", "dog", "emu"], "fraction": 1}
    experiment = small_experiment(tmp_path / "out", data=data, train={"rounds": 1}, run={"target": "c"})
    folder, _ = run_small(experiment)
    said = json.loads((folder / "environment.json").read_text())["data_remarks"]
    assert said == [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said[0].startswith("no client has training images of emu, which c is tested on")


def test_features_that_no_source_scales_are_said_and_those_of_one_site_are_not_called_so(tmp_path):
    """No source has a y, and all have one z; a alone lacks w, which becomes the mean of b."""
    rows = ["x,y,z,w,label,domain"]
    for place, domain in enumerate("abc"):
        for row in range(12):
            more = "250,900,1" if domain == "c" else f",3,{row if place else ''}"
            rows.append(f"{100 * place + row},{more},{'uv'[row % 2]},{domain}")
    (tmp_path / "t.csv").write_text("\n".join(rows))
    data = {"dataset": "arrays", "root": str(tmp_path / "t.csv"), "domains": [], "fraction": 1}
    model = {"backbone": "mlp", "options": {"norm": "none"}}
    experiment = tiny_experiment(tmp_path / "out", rounds=1, data=data, model=model, run={"target": "c"})
    folder, _ = run_small(experiment)
    said = json.loads((folder / "environment.json").read_text())["data_remarks"]
    assert said == [
        "a has no value of w; they become the mean of the other sources",
        "the sources have no value of y, z, or one alone, so that these are not scaled: other values of another "
        "domain enter the model as they are; leave them out of the features",
    ]


def test_a_method_that_trains_much_more_than_fedavg_says_so():
    """134 images in batches of 32 are 5 steps: (1,800 + 3 * 5) / (3 * 5) = 121, for 5 clients."""
    csac = ["method.name=csac", "method.semantic_calibration.acquire_iterations=1800"]
    plans = [
        resolve(read_experiment("digits", ["train.rounds=3", "train.batch_size=32", "train.epochs=1", *more]))
        for more in (csac, [*csac, "train.budget=images"], ["method.name=fedprox"])
    ]
    said, *silent = [budget_notes(plan, [134] * 5) for plan in plans]
    assert silent == [[], []]
    assert said[0].startswith("csac trains on 120 times the images of FedAvg and takes 120 times its steps, 9,000 of ")


def test_more_images_than_published_and_classes_that_no_one_trains():
    pacs, even, person = BENCHMARKS["pacs"], [1] * 7, [1] * 6 + [0]
    assert data_notes(pacs, {"photo": 1670, "sketch/0": 3929}, [even], "photo", even) == []
    (said,) = data_notes(pacs, {"photo": 1670, "sketch/0": 3930}, [even], "photo", even)
    assert said.startswith("sketch has 3,930 images, and PACS was published with 3,929;")
    sources = [person, [2] * 6 + [0]]
    (said,) = data_notes(pacs, {}, sources, "photo", even)
    assert said.startswith("no client has training images of person, which photo is tested on;")
    assert data_notes(pacs, {}, sources, "photo", person) == []
    assert data_notes(pacs, {}, [*sources, ()], "photo", even) == []  # a client has not answered yet


@pytest.mark.parametrize("method", ["perada", "scaffold", "fedig", "copa", "plan"])
def test_bytes_are_those_of_clients_csv(method, tmp_path):
    """Sums per client and round, and bytes of each bank, are equal from round 2 on, when every bank is filled."""
    model = dict(text.removeprefix("model.").split("=") for text in METHODS[method].tried_with)
    experiment = tiny_experiment(tmp_path, method, model=model, data={"image_size": 16} if model else {})
    folder, _ = run_small(experiment)
    clients = numbers(folder / "clients.csv").query("round == 2")
    rows = [row for row in traffic(resolve(experiment)) if row.when == "round"]
    for way in ("down", "up"):
        assert (clients[f"bytes_{way}"] == sum(getattr(row, way) for row in rows)).all()
    banks = {row.record.removeprefix("bank "): row for row in rows if row.record.startswith("bank ") and row.down}
    for name, row in banks.items():
        assert (clients[f"bytes_down_{name}"] == row.down).all()
    assert bool(banks) == (method in ("scaffold", "fedig", "copa"))


def test_amounts_that_depend_on_the_data_are_unknown():
    rows = {row.record: row for row in traffic(resolve(tiny_experiment("unused", "fada")))}
    assert rows["bank target_features"].down is None
    assert rows["target_attention"].when == rows["target_training"].when == "visit"


A, B = {"python": "3.11", "device": "cpu"}, {"python": "3.12", "device": "cpu"}


def test_environments_and_their_rounds():
    assert earlier_environments({}, A, -1) == {}
    assert earlier_environments(A, A, 4) == {}
    assert earlier_environments(A, {**A, "cores_free": 3}, 4) == {}
    second = earlier_environments(A, B, 4)
    assert second == {"from_round": 5, "earlier": [{**A, "from_round": 0}]}
    third = earlier_environments({**B, **second}, A, 7)
    assert [one["from_round"] for one in third["earlier"]] == [0, 5]
    assert third["from_round"] == 8
    assert earlier_environments({**B, **second}, B, 7) == second  # interrupted again, on the same machine
    assert earlier_environments({**B, **second}, A, 4) == {}  # killed before B completed a round
    assert earlier_environments({**B, **second}, A, -1) == {}  # begun again


def test_a_resumed_run_records_both_and_a_table_says_it(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        actual = session.environment
        patch.setattr(session, "environment", lambda: actual() | {"python": "3.9.0"})
        folder = interrupt(tiny_experiment(tmp_path, rounds=3), 2)
    record = json.loads((folder / "environment.json").read_text())
    assert not {"earlier", "from_round"} & record.keys()
    folder, _ = run_small(tiny_experiment(tmp_path, rounds=3, run={"on_client_failure": "continue"}))
    record = json.loads((folder / "environment.json").read_text())
    (first,) = record["earlier"]
    assert (first["python"], first["from_round"], first["on_client_failure"]) == ("3.9.0", 0, "stop")
    assert (record["from_round"], record["on_client_failure"]) == (3, "continue")
    assert record["python"] != "3.9.0"
    assert "recipe" not in first
    notes = " ".join(compare(read_runs(folder.parents[2])).notes)
    assert "Python 3.9.0 (fedavg/rot45/seed0 from round 0)" in notes
    assert "(fedavg/rot45/seed0 from round 3)" in notes


def test_the_images_take_the_size_of_the_weights():
    plan = resolve(read_experiment("digits", ["data.image_size=0", "model.backbone=resnet18"]))
    assert plan.experiment.data.image_size == 224  # and so it is recorded, compared and sent to the sites
    assert resolve(plan.experiment).experiment == plan.experiment
    with pytest.raises(UserError, match=r"data.image_size is 0.*digits-cnn-bn has no such weights: name a size"):
        resolve(read_experiment("digits", ["data.image_size=0"]))
    for size in (-1, 7, 1025):
        with pytest.raises(UserError, match=r"data\.image_size"):
            read_experiment("digits", [f"data.image_size={size}"])


@pytest.mark.parametrize("count", [1, 7, 100])
@pytest.mark.parametrize("nodes", [1, 2, 10])
def test_every_client_has_one_node_and_no_node_more_than_its_share(count, nodes, tmp_path):
    plan = resolve(small_experiment(tmp_path, data={"clients_per_domain": count}))
    places = [{"partition-id": place, "num-partitions": nodes} for place in range(nodes)]
    shares = [node_clients(Context(1, 2, place, RecordDict(), {}), plan) for place in places]
    assert sorted(client for share in shares for client in share) == sorted(plan.clients)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


MASKS = {"dataset": "digit-masks", "image_size": 32}
COLOURLESS = {Trait.COLOURS: False, Trait.MASKS: False, Trait.STEM: False, Trait.BOTTLENECK: False}


@pytest.mark.parametrize(("section", "values", "said"), [
    ("data", {"classes": ["0", "1"]}, "data.classes has an effect only with data.dataset = 'folder' or 'table' or"),
    ("data", {"structures": {"x": [1]}}, "data.structures has an effect only with data.dataset = 'masks'"),
    ("train", {"dp_epsilon": 0.5}, "train.dp_epsilon has an effect only with train.dp_clip above 0"),
    ("data", {"dataset": "pacs", "lists": "x"}, "data.lists .* only with .* and data.split = 'lists' or"),
    ("data", {"dataset": "digits-dg", "lists": "x", "split": "lists"}, "data.lists .* only with images in folders"),
])  # fmt: skip
def test_a_setting_without_effect_is_refused(section, values, said):
    with pytest.raises(UserError, match=rf"^{said}.*; leave it out$"):
        resolve(Experiment(**{section: values}))


@pytest.mark.parametrize("settings", [
    {"data": {"partition": "dirichlet", "alpha": 0.1, "mix": 0.5}},
    {"data": {"partition": "iid", "alpha": 0.1, "clients_per_domain": 2}},  # a grid over both partitions
    {"data": {**MASKS, "mask_threshold": 0.9, "largest_component": True}, "model": {"backbone": "unet-small"}},
    {"train": {"dp_epsilon": 0.5}, "run": {"label": "train.dp_clip=0"}},  # a grid over the clip, with runs without it
    {"data": {"dataset": "pacs", "lists": "x", "test_split": "list"}},
    {"data": DataSettings().model_dump()},  # defaults may be written down
])  # fmt: skip
def test_the_same_setting_with_an_effect_is_accepted(settings):
    experiment = Experiment(**settings)
    kept = resolve(experiment).experiment
    assert (kept.data, kept.model) == (experiment.data, experiment.model)


@pytest.mark.parametrize(("dataset", "said"), [("digits", 1), ("digit-masks", 1), ("hospitals", 1), ("drawings", 0)])
def test_a_folder_of_data_that_are_in_a_package_is_said(dataset, said):
    """Who gives a folder and forgets the data set trains on other data than he means."""
    experiment = Experiment(data={"dataset": dataset, "root": "photos"})
    notes = no_effect_notes(experiment, Recipe(), Recipe(), data_facts(experiment, BENCHMARKS[dataset]))
    assert [text.split(",")[0] for text in notes if "data.root" in text] == ["data.root has no effect here"] * said


def test_what_a_sweep_over_the_other_setting_has_is_said():
    """One and four clients per domain with the same partition are a usual sweep, which is not refused."""
    data = {"partition": "dirichlet", "alpha": 0.1}
    resolve(Experiment(data=data))
    said = no_effect_notes(Experiment(data=data, model={"prompt": "{} x"}), Recipe(), Recipe(), {})
    assert [text.split(" has no effect here")[0] for text in said] == ["data.partition", "data.alpha", "model.prompt"]
    assert no_effect_notes(Experiment(data={**data, "clients_per_domain": 4}), Recipe(), Recipe(), {}) == []
    drawn = Experiment(train={"clients_per_round": 2})  # one client with all data is never drawn
    assert [len(no_effect_notes(drawn, METHODS[name], METHODS[name], {})) for name in ("fedavg", "deepall")] == [0, 1]
    train = {"dp_epsilon": 0.5}
    grid = Experiment(train=train, run={"label": "train.lr=0.1,train.dp_clip=0.0"})
    said = ["train.dp_epsilon has no effect here, only with train.dp_clip above 0"]
    assert no_effect_notes(grid, Recipe(), Recipe(), {}) == said
    with pytest.raises(UserError, match=r"^train\.dp_epsilon has an effect only with"):
        resolve(Experiment(train=train, run={"label": "train.dp_epsilon=0.5"}))


@pytest.mark.parametrize(("method", "setting", "value", "facts", "needed"), [
    ("randconv", "random_convolution.p", 0.1, {}, "method.random_convolution.variant = 'img_p'"),
    ("fedbn", "without_batch_norm.share_scores", True, {}, "method.norm = 'xan'"),
    ("gperxan", "xan.stem", False, COLOURLESS, "a backbone with batch norm before its first stage"),
    ("moon", "projection_head.always", True, COLOURLESS, "model.bottleneck above 0"),
    ("jigen", "jigsaw.grey", 0.5, COLOURLESS, "images of three channels"),
    ("elcfs", "episodic_step.gamma", 0.5, COLOURLESS, "data that have masks"),
    ("fada", "adversarial_target.sample", 600, {Size.TARGET_IMAGES: 512}, "a value below the number of images"),
    ("fada", "adversarial_target.sample", 600, {Size.TARGET_IMAGES: 513}, ""),
    ("feddg-ga", "generalization_gap.max_samples", 80, {Size.CLIENT_IMAGES: 80}, "a value below"),  # 0 is all
])  # fmt: skip
def test_a_parts_setting_without_effect_is_said(method, setting, value, facts, needed):
    part, field = setting.split(".")
    plan = resolve(small_experiment("unused", {"name": method, part: {field: value}}))
    said = no_effect_notes(plan.experiment, plan.recipe, plan.row, facts)
    starts = [text.startswith(f"method.{setting} has no effect here, only with {needed}") for text in said]
    assert starts == [True] * bool(needed)


@pytest.mark.parametrize(("method", "backbone", "said"), [
    ("fedavg", "digits-cnn", 0), ("feddrop", "digits-cnn", 0), ("copa", "digits-cnn", 0), ("fedbn", "digits-cnn-bn", 0),
    ("fedbn", "digits-cnn", 1), ("silobn", "digits-cnn", 1),
])  # fmt: skip
def test_a_share_rule_that_keeps_nothing_back_is_said(method, backbone, said):
    net = build_model(ModelSettings(backbone=backbone), 10, 1, 28)
    remarks = share_notes(net, METHODS[method].share)
    assert [text.startswith("method.share has no effect here: without_") for text in remarks] == [True] * said


def test_a_recorded_run_may_have_what_a_new_one_may_not():
    """The model of a run that is not made any more can still be exported and evaluated."""
    data, run = {"variant": "domainbed"}, {"target": "rot75", "validation_domain": "rot0"}
    assert resolve(Experiment(data=data, run=run), recorded=True).clients == ("rot15", "rot30", "rot45", "rot60")
    shared = Experiment(data={"test_split": "list", "fraction": 0.5})
    resolve(shared, recorded=True)
    said = r"^data.fraction takes no share of the images that data.test_split = 'list' tests; leave it at 1$"
    with pytest.raises(UserError, match=said):
        resolve(shared)
    refused = Experiment(method={"name": "feddyn", "fuse": "coordinate_median"})
    with pytest.raises(UserError, match="use one of the two"):
        resolve(refused)
    assert resolve(refused, recorded=True).recipe.refine


@pytest.mark.parametrize(("method", "more", "text"), [
    ("feddg-ga", ["train.clients_per_round=2"], "2 clients train in a round of generalization_adjustment: two gaps"),
    ("afl", ["train.clients_per_round=1"], "1 client trains in a round of agnostic_weights: the weights of so few"),
    ("qfedavg", ["data.domains=['rot0', 'rot15', 'rot30']"], "2 clients train in a round of q_fed_avg: with one"),
    ("feddg-ga", [], ""), ("afl", ["train.clients_per_round=3"], ""), ("fedavg", ["train.clients_per_round=1"], ""),
])  # fmt: skip
def test_rules_that_compare_clients_say_where_few_train(method, more, text):
    notes = few_client_notes(resolve(read_experiment("digits", [f"method.name={method}", *more])))
    assert [note[: len(text)] for note in notes] == ([text] if text else [])


@pytest.mark.parametrize(("model", "normalize", "says"), [
    ({"backbone": "resnet18", "weights": "imagenet"}, "none", True),
    ({"backbone": "resnet18", "weights": "imagenet"}, "weights", False),
    ({"backbone": "resnet18", "weights": "imagenet"}, "imagenet", False),
    ({"backbone": "resnet18", "weights": "none"}, "none", False),
    ({"backbone": "timm:tf_efficientnet_lite0", "weights": "package"}, "imagenet", True),
    ({"backbone": "timm:tf_efficientnet_lite0", "weights": "package"}, "weights", False),
])  # fmt: skip
def test_weights_and_normalization_that_do_not_belong_together_are_said(model, normalize, says):
    experiment = Experiment(data=DataSettings(dataset="pacs", normalize=normalize), model=ModelSettings(**model))
    notes = weight_notes(experiment, BENCHMARKS["pacs"])
    assert [f"data.normalize = {normalize!r} does not take these" in note for note in notes] == [True] * says
