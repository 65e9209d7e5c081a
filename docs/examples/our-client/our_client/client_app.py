"""The ClientApp: fedsim's client, with the data and the network of this app."""

import fedsim
from our_client.task import DOMAINS, Net, load_domain

METHOD = "gperxan"


def load(context):
    """(name of the domain, training data, validation data) of a client."""
    number = context.node_config["partition-id"]
    return DOMAINS[number], load_domain(number), load_domain(number, test=True)


app = fedsim.client_app(METHOD, model=Net, data=load, lr=0.05, epochs=1, batch_size=32)
