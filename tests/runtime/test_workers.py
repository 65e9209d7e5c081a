"""A worker in the abstract: what it is sent, which task is blamed for its deaths, and how long its end may take."""

import time

from fedsim.common.workers import Worker, WorkerDiedError, stop


class Scripted(Worker):
    """A worker of a play: each of `events` is the tasks that it ends, or None when it dies."""

    def __init__(self, repeats, most):
        super().__init__()
        self.repeats, self.most = repeats, most
        self.is_alive, self.events, self.log, self.deadlines = False, [], [], []

    @property
    def is_running(self):
        return self.is_alive

    def start(self):
        self.is_alive = True
        self.log.append("start")

    def send(self, tasks):
        self.log.append("".join(tasks[self.sent :]))
        self.sent = len(tasks)

    def results(self):
        event = self.events.pop(0)
        if event is None:
            raise WorkerDiedError("it died")
        return [task.upper() for task in event]

    def failure(self, task, cause):
        return cause

    def release(self, deadline):
        self.is_alive = False
        self.deadlines.append(deadline)


def played(worker, tasks, *events):
    """What the worker ends with these events, one after the other."""
    worker.events = list(events)
    for task in tasks:
        worker.give(task)
    return [worker.receive() for _ in events]


def test_a_task_that_tells_its_progress_is_not_sent_again():
    worker = Scripted(repeats=False, most=1)
    assert played(worker, "ab", "", "", "a", "", "b") == [[], [], [("a", "A")], [], [("b", "B")]]
    assert worker.log == ["start", "a", "b"]


def test_without_repetition_the_first_task_fails_and_the_next_one_has_a_new_worker():
    worker = Scripted(repeats=False, most=1)
    assert played(worker, "ab", None, "b") == [[("a", "it died")], [("b", "B")]]
    assert worker.log == ["start", "a", "start", "b"]


def test_tasks_that_may_have_killed_a_worker_are_done_again_alone_and_one_that_kills_again_fails():
    worker = Scripted(repeats=True, most=None)
    assert played(worker, "abc", "a", None, "b", None) == [[("a", "A")], [], [("b", "B")], [("c", "it died")]]
    assert worker.log == ["start", "a", "b", "c", "start", "b", "c"]
    assert played(worker, "cd", None, "c", "d") == [[], [("c", "C")], [("d", "D")]]  # the next death counts anew


def test_all_workers_end_by_one_deadline_and_keep_their_tasks():
    workers = [Scripted(repeats=True, most=1) for _ in range(3)]
    workers[0].give("a")
    played(workers[1], "b", "b")
    before = time.monotonic()
    stop(workers, 7.0)
    assert workers[0].deadlines[-1] == workers[1].deadlines[-1]
    assert before + 7.0 <= workers[0].deadlines[-1] <= time.monotonic() + 7.0
    assert workers[2].deadlines == []  # it was never started
    assert [list(worker.tasks) for worker in workers] == [["a"], [], []]
    workers[0].give_up()
    assert not workers[0].tasks
