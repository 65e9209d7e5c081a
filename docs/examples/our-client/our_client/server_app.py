"""The ServerApp: the server's side of the same method."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import fedsim
from our_client.client_app import METHOD
from our_client.task import DOMAINS, Net, load_domain

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train with the clients, and test on a domain that no client has."""
    config = context.run_config
    strategy = fedsim.strategy(METHOD, Net, client="fedsim", output=str(config["output"]))
    result = strategy.start(grid, num_rounds=int(config["num-server-rounds"]), target=(DOMAINS[3], load_domain(3)))
    print("unseen domain:", result.evaluate_metrics_serverapp)
