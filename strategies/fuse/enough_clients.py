"""What several fusion rules share: the number of clients in a round, and weights in the records."""

from collections.abc import Sequence

import numpy as np

from fedsim.common.errors import UserError
from fedsim.data import client_names
from fedsim.settings.experiment import Experiment
from strategies.parts import Arrays, ServerRound, Update


def clients_in_a_round(experiment: Experiment) -> int:
    """The number of clients that train in a round when none fails; 0 for a recipe that is only shown."""
    if not experiment.run.target:
        return 0
    count = len(client_names(experiment.data, experiment.run.target))
    return min(count, experiment.train.clients_per_round or count)


def refuse_too_few(experiment: Experiment, part: str, factor: int, malicious: int) -> None:
    """Raises UserError when a round has fewer than `factor` f + 3 clients, which the rule needs against f of them."""
    count, needed = clients_in_a_round(experiment), factor * malicious + 3
    if count and count < needed:
        raise UserError(
            f"method.{part}.malicious = {malicious} needs {needed} clients in a round, at least ({factor} f + 3), and "
            f"there are {count}; use several clients per domain (data.clients_per_domain)"
        )


def equal_columns(updates: Sequence[Update], server: ServerRound) -> None:
    """Writes equal weights for all clients into clients.csv."""
    server.client_columns |= {update.client: {"weight": 1.0 / len(updates)} for update in updates}


def note_coefficients(updates: Sequence[Update], server: ServerRound, quantity: str, found: Arrays) -> None:
    """Writes each tensor's coefficients [K] into details.csv, and their means over the tensors into clients.csv."""
    for index, update in enumerate(updates):
        for name, scores in found.items():
            server.detail(update.client, quantity, name, scores[index])
        mean = float(np.mean([scores[index] for scores in found.values()]))
        server.client_columns[update.client] = {"weight": mean}
