"""Records, tensors, shapes and bytes of messages: three clients, images of 16 pixels, ten classes, 50 features."""

from dataclasses import dataclass, field

from fedsim.tensors.arrays import record_to_arrays
from fedsim.testing.contract import Evidence

CLIENTS, OTHERS = ("rot0", "rot15", "rot30"), ("rot15", "rot30")
C, D = 10, 50  # classes, features
NORMS = 2 * (10 + 20)  # scale and shift of both layers; as many running statistics, and two counters of 8 bytes
PARAMETERS = (25 * 10 + 10) + (10 * 25 * 20 + 20) + (320 * D + D) + (D * C + C) + NORMS
MODEL = 4 * (PARAMETERS + NORMS) + 2 * 8
HEAD = 4 * (D * C + C)
REPORTED = {"images", "num-examples", "steps", "train_loss", "train_seconds"}
VALIDATED = {"accuracy", "evaluation_seconds", "loss", "num-examples"}


@dataclass(frozen=True)
class Exchange:
    """One client's second round: bytes of the model (sent to train, returned, sent to validate), other records as
    {tensor: shape}, and metrics in addition to FedAvg's. once: records that are collected before the first round and
    sent in it."""

    model: tuple[int, int, int] = (MODEL, MODEL, MODEL)
    down: dict = field(default_factory=dict)
    up: dict = field(default_factory=dict)
    collected: dict = field(default_factory=dict)
    once: tuple[dict, dict] = ({}, {})
    metrics: frozenset = frozenset()
    validation: frozenset = frozenset()


def plus(floats: int) -> tuple[int, int, int]:
    """Bytes of the model with this many more parameters, in all three messages."""
    return (MODEL + 4 * floats,) * 3


def parameter_shapes() -> dict:
    return {
        "backbone.conv1.weight": (10, 1, 5, 5), "backbone.conv1.bias": (10,), "backbone.norm1.weight": (10,),
        "backbone.norm1.bias": (10,), "backbone.conv2.weight": (20, 10, 5, 5), "backbone.conv2.bias": (20,),
        "backbone.norm2.weight": (20,), "backbone.norm2.bias": (20,), "backbone.fc.weight": (D, 320),
        "backbone.fc.bias": (D,), "head.weight": (C, D), "head.bias": (C,),
    }  # fmt: skip


REFERENCE = {"r_mu": (C, D), "r_rho": (C, D)}
GENERATOR = {"hidden.weight": (32, 16 + C), "hidden.bias": (32,), "out.weight": (D, 32), "out.bias": (D,)}
HEADS = {f"{name}:head.{key}": shape for name in CLIENTS for key, shape in (("weight", (C, D)), ("bias", (C,)))}
GRADIENT = {"head.weight": (C, D), "head.bias": (C,)}
CONTROL = {"control": parameter_shapes()}
PERSONAL = {
    "metrics": frozenset({"personal_train_loss"}),
    "validation": frozenset({"personal_accuracy", "personal_loss"}),
}
COUNTED = frozenset({"gradient_count", "learning_rate"})
ADAPTER = 20 * 20 + 4 * 20  # this network gets one, after its last norm: a 1x1 convolution without bias, a batch norm

TABLES = {
    "fedavg": Exchange(),
    "ccst": Exchange(once=(  # 2 C_s floats a client, C_s = 1 channel; the whole bank comes down
        {"style": {"mean": (1, 1), "std": (1, 1)}},
        {"style": {f"{name}:{key}": (1, 1) for name in CLIENTS for key in ("mean", "std")}},
    )),
    "elcfs": Exchange(once=(  # an eighth of 40 images, b = 0: one bin; the others' come down
        {"amplitude": {"amplitude": (5, 1, 1, 1)}},
        {"amplitude": dict.fromkeys(OTHERS, (5, 1, 1, 1))},
    )),
    "stablefdg": Exchange(  # 4 C_1 floats each way; 90 D + 90 for the highlighter, whose D features the head sees too
        plus(90 * 20 + 90 + 20 * C),
        down={"feature_style": {"style": (4, 20)}},
        up={"feature_style": {"style": (4, 20)}},
    ),
    "fedccrl": Exchange(once=(  # a tenth of 40 images, two floats a channel; the others' rows come down, joined
        {"pixel_stats": {"mean": (4, 1), "std": (4, 1)}},
        {"pixel_stats": {"mean": (8, 1), "std": (8, 1)}},
    ), metrics=frozenset({"contrast_loss", "js_loss"})),
    "fedadg": Exchange(  # G both ways, neither D nor P
        down={"generator": GENERATOR},
        up={"generator": GENERATOR},
        metrics=frozenset({"ce_loss", "discriminator_loss", "feature_loss", "generator_loss"}),
    ),
    "fedsr": Exchange(  # d_in d_z + d_z floats for the doubled head, r both ways, counts up
        plus(D * 2 * D + 2 * D),
        down={"class_reference": REFERENCE},
        up={"class_reference": {**REFERENCE, "counts": (C,)}},
        metrics=frozenset({"cmi_loss", "l2r_loss"}),
    ),
    "fedl2r": Exchange(plus(D * D + D), metrics=frozenset({"l2r_loss"})),
    "fpl": Exchange(  # at most C d floats up, one cluster a class down, with the classes
        down={"prototypes": {"cluster_protos": (C, D), "classes": (C,)}},
        up={"prototypes": {"protos": (C, D), "classes": (C,)}},
        metrics=frozenset({"cpcl_loss", "upcr_loss"}),
    ),
    "fisc": Exchange(  # 2 C_s floats up, and as many of one style down
        once=({"interpolation": {"mean": (1, 1), "std": (1, 1)}},) * 2,
        metrics=frozenset({"norm_loss", "triplet_loss"}),
    ),
    "perada": Exchange(  # adapters, norm and head alone; never the personal ones
        (4 * (ADAPTER + 2 * NORMS) + HEAD + 3 * 8,) * 3, **PERSONAL
    ),
    "ditto": Exchange(**PERSONAL),
    "scaffold": Exchange(down=CONTROL, up=CONTROL),
    "fediir": Exchange(
        down={"classifier_gradient": GRADIENT},
        collected={"classifier_gradient": {**GRADIENT, "batches": (1,)}},
        metrics=frozenset({"classifier_distance"}),
    ),
    "fednova": Exchange(metrics=COUNTED),
    "fedcm": Exchange(down={"momentum": parameter_shapes()}, metrics=COUNTED),
    "afl": Exchange(metrics=frozenset({"received_loss"})),
    # half of the first norm's channels are instance norm: 10 statistics fewer; heads do not come down with the model
    "copa": Exchange((MODEL - 40 - HEAD, MODEL - 40, MODEL - 40), down={"heads": HEADS}),
    "fedbn": Exchange((MODEL - 8 * NORMS - 16, MODEL, MODEL)),
    "silobn": Exchange((MODEL - 4 * NORMS - 16, MODEL, MODEL)),
    "moon": Exchange(  # the projection, and a head on its 256 numbers
        plus(D * D + D + D * 256 + 256 + (256 - D) * C), metrics=frozenset({"contrast_loss"})
    ),
    "l2d": Exchange(plus(D * D + D + D * D + D), metrics=frozenset({"augmenter_loss"})),
    "jigen": Exchange(plus(D * 31 + 31), metrics=frozenset({"jigsaw_loss"})),
    "csac": Exchange(),
    "feddg-ga": Exchange(metrics=frozenset({"gap", "gap_valid"})),
}  # fmt: skip


def shapes(content) -> dict:
    """The records other than the model, as {tensor: shape}."""
    records = {name: record_to_arrays(own) for name, own in content.array_records.items() if name != "arrays"}
    return {name: {key: tuple(array.shape) for key, array in own.items()} for name, own in records.items()}


def size(content) -> int:
    return sum(array.nbytes for array in record_to_arrays(content.array_records["arrays"]).values())


def metrics(content) -> set:
    return {name for record in content.metric_records.values() for name in record}


def off_the_table(whole: Evidence) -> str:
    """The second round's messages of a client are those of its table, and the first's if something is sent once"""
    table, at = TABLES[whole.plan.experiment.method_name], {}
    for message, reply in whole.messages:
        config = message.content.config_records["config"]
        if config["client"] == "rot0":
            at[message.metadata.message_type, config["phase"], config.get("round")] = message.content, reply.content
    (sent, returned), (validated, answer) = at["train", "train", 2], at["evaluate", "evaluate", 2]
    collected, bank = table.once
    asked = [number for kind, _, number in at if kind == "query.collect"]
    pairs = {
        "bytes": ((size(sent), size(returned), size(validated)), table.model),
        "records": (tuple(map(shapes, (sent, returned, validated, answer))), (table.down, table.up, {}, {})),
        "metrics": ((metrics(returned), metrics(answer)), (REPORTED | table.metrics, VALIDATED | table.validation)),
        "other records": (({*returned.config_records}, {*answer.config_records}), ({"echo", "state"}, {"echo"})),
        "state": (set(returned.config_records["state"]), {"entries"}),
        "sent once": (shapes(at["train", "train", 1][0]), bank or shapes(at["train", "train", 1][0])),
        "collected": ([shapes(at["query.collect", "collect", number][1]) for number in asked],
                      [collected] if bank else [table.collected] * 2 if table.collected else []),
    }  # fmt: skip
    return "; ".join(
        f"{what}: {found}, expected {wanted}" for what, (found, wanted) in pairs.items() if found != wanted
    )
