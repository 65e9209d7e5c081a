"""The images of a run's sites as they are on disk, in [0, 1]: what statistics, validation and test are made of."""

import torch

from fedsim.data import load_client, load_target


def in_unit(images):
    return torch.from_numpy(images).float() / 255


def training_images(plan, client):
    """[n, C, H, W] of one client."""
    data = load_client(plan.experiment.data, client, plan.experiment.run.target, plan.data)
    return in_unit(data.images[data.train])


def validation_images(plan, client):
    """(images, labels) of one client."""
    data = load_client(plan.experiment.data, client, plan.experiment.run.target, plan.data)
    return in_unit(data.images[data.validation]), torch.from_numpy(data.labels[data.validation])


def images_of_target(plan):
    """(images, labels) of the unseen domain."""
    images, labels, indices = load_target(plan.experiment.data, plan.experiment.run.target, plan.data)
    return in_unit(images[indices]), torch.from_numpy(labels[indices])
