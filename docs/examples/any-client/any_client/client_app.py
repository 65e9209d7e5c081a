"""The ClientApp, as `flwr new` makes it; the three lines with a remark are for the method on the server."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from any_client.task import DOMAINS, Net, load_data
from any_client.task import test as test_fn
from any_client.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    """Train the model on local data."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    number = context.node_config["partition-id"]
    trainloader, _ = load_data(number)
    torch.manual_seed(number)

    received_loss, _ = test_fn(model, trainloader)  # for FedDG-GA
    train_loss = train_fn(model, trainloader, 1, msg.content["config"]["lr"])
    trained_loss, _ = test_fn(model, trainloader)  # for FedDG-GA

    metrics = {
        "train_loss": train_loss,
        "num-examples": len(trainloader.dataset),
        "received_loss": received_loss,
        "trained_loss": trained_loss,
        "steps": len(trainloader),  # for FedNova
    }
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Evaluate the model on local data."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    number = context.node_config["partition-id"]
    _, valloader = load_data(number)
    eval_loss, eval_acc = test_fn(model, valloader)
    metrics = {"eval_loss": eval_loss, "eval_acc": eval_acc, "num-examples": len(valloader.dataset)}
    content = RecordDict({"metrics": MetricRecord(metrics)})
    content["config"] = ConfigRecord({"domain": DOMAINS[number]})  # the client's name in records
    return Message(content=content, reply_to=msg)
