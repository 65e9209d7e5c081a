"""The ServerApp, as `flwr new` makes it, with a method of fedsim in place of FedAvg."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

import fedsim
from any_client.task import DOMAINS, Net, load_domain

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train with the clients, and test on a domain that no client has."""
    config = context.run_config
    torch.manual_seed(0)
    global_model = Net()
    strategy = fedsim.strategy(str(config["method"]), global_model, output=str(config["output"]))
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(global_model.state_dict()),
        train_config=ConfigRecord({"lr": config["learning-rate"]}),
        num_rounds=int(config["num-server-rounds"]),
        target=(DOMAINS[3], load_domain(3, test=True)),
    )
    print("unseen domain:", result.evaluate_metrics_serverapp)
