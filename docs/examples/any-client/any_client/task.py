"""A network, and digits as four scanners show them, with less and less contrast; the fourth one is unseen."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DOMAINS = ("scanner-a", "scanner-b", "scanner-c", "scanner-d")
CONTRAST = (1.0, 0.6, 0.35, 0.2)


class Net(nn.Module):
    """A small convolutional network for 8 x 8 pixels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.fc1 = nn.Linear(16 * 16, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def load_domain(number, test=False):
    """The images of a domain with their classes: a quarter of the digits, by the contrast of its scanner."""
    digits = load_digits()
    images = torch.tensor(digits.images[number::4, None] / 16.0 * CONTRAST[number], dtype=torch.float32)
    classes = torch.tensor(digits.target[number::4])
    part = slice(0, 90) if test else slice(90, None)
    return TensorDataset(images[part], classes[part])


def load_data(number):
    """(training batches, validation batches) of a client."""
    return (
        DataLoader(load_domain(number), batch_size=32, shuffle=True),
        DataLoader(load_domain(number, test=True), batch_size=90),
    )


def train(net, batches, epochs, lr):
    """Trains a network; returns the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    net.train()
    losses = []
    for _ in range(epochs):
        for images, classes in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images), classes)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


def test(net, batches):
    """(mean loss, accuracy) of a network."""
    net.eval()
    loss, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for images, classes in batches:
            outputs = net(images)
            loss += F.cross_entropy(outputs, classes, reduction="sum").item()
            correct += (outputs.argmax(1) == classes).sum().item()
            count += len(classes)
    return loss / count, correct / count
