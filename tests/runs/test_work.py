"""The work that a round orders of each client."""

from support import tiny_experiment

from fedsim.runs import work
from fedsim.runs.plan import resolve


def test_what_all_clients_share_is_computed_once(tmp_path, monkeypatch):
    """A list or a maximum of all clients for each of 100,000 clients would take minutes before the first round."""
    plan = resolve(tiny_experiment(tmp_path, data={"clients_per_domain": 4}))
    assert len(plan.clients) == 12
    calls = []
    amount = work.fedavg_amount
    monkeypatch.setattr(work, "fedavg_amount", lambda *words: calls.append(words) or amount(*words))
    ordered = work.orders(plan, dict.fromkeys(plan.clients, 10) | {plan.clients[3]: 20})
    assert [examples for examples, _ in calls] == [20]
    # one step of 8 images is planned for each, and FedAvg's would be one of 8 on the largest client, too
    assert set(ordered) == set(plan.clients)
    assert ordered[plan.clients[0]] == {"images": 8, "steps": 1}
