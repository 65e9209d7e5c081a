from typing import Protocol


class RunCallback(Protocol):
    pass
class TensorBoardCallback:
    pass
