"""Rounds of many clients are recorded by domain, with the same means and sums."""

import pandas as pd
import pytest

from fedsim.data import domain_of
from fedsim.results.client_rows import MOST_ROWS, client_rows, detail_rows


def crowd(count):
    own = {"round": 3, "status": "ok", "bytes_down": 10, "weight": 1 / count, "train_seconds": 0.5}
    return [
        own
        | {
            "domain": (domain := "art" if number % 3 else "photo"),
            "client": f"{domain}/{number}",
            "examples": number + 1,
            "train_loss": number / 7,
            "validation_accuracy": (number % 5) / 5,
            "validation_examples": 1 + number % 4,
            "gap": float(number),
        }
        for number in range(count)
    ]


def test_few_clients_keep_their_rows():
    rows = crowd(MOST_ROWS)
    assert client_rows(rows) is rows
    assert len(client_rows(rows, "domains")) == 2
    assert client_rows(crowd(300), "clients") == crowd(300)


def test_a_domain_has_the_sums_and_means_of_its_clients():
    rows = crowd(300)
    rows[5]["status"] = "no reply within 5 s"
    merged = client_rows(rows)
    assert [row["client"] for row in merged] == ["photo/*", "art/*", "art/5"]
    frame = pd.DataFrame(rows).drop(index=5)
    for row in merged[:2]:
        own = frame[frame["domain"] == row["domain"]]
        assert row["clients"] == len(own)
        for column in ("bytes_down", "examples", "weight", "train_seconds", "validation_examples"):
            assert row[column] == pytest.approx(own[column].sum())
        for column, weight in (("train_loss", "examples"), ("validation_accuracy", "validation_examples")):
            assert row[column] == pytest.approx((own[column] * own[weight]).sum() / own[weight].sum())
        assert row["gap"] == pytest.approx(own["gap"].mean())


def test_details_are_means_over_a_domain():
    details = [
        {"client": f"{domain}/{number}", "quantity": "coefficient", "name": "head", "value": float(number)}
        for domain in ("art", "photo")
        for number in range(150)
    ]
    details.append({"client": "sketch", "quantity": "dice", "name": "disc", "value": 0.25})
    assert detail_rows(details, MOST_ROWS, domain_of) is details
    found = [(row["client"], row["value"]) for row in detail_rows(details, 300, domain_of)]
    assert found == [("art/*", 74.5), ("photo/*", 74.5), ("sketch", 0.25)]
