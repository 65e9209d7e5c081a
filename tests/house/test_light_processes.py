"""What a run's process does not import: it starts faster without, in each client process of a deployed round too."""

import subprocess
import sys

HEAVY = ("ray", "torchvision", "torch._dynamo", "flwr.simulation", "scipy", "sklearn", "matplotlib")

CODE = """
import sys
sys.modules["ray"] = None
from fedsim.settings.experiment import read_experiment
from fedsim.runtime.launch import launch
launch(read_experiment("digits", ["train.rounds=1", "data.fraction=0.05", "run.output=" + sys.argv[1]]))
print(*(name for name in sys.argv[2:] if sys.modules.get(name) is not None))
"""


def test_an_inline_run_of_digits_imports_nothing_heavy(tmp_path):
    """torchvision takes two seconds, PyTorch's compiler one; Ray and Flower's simulation need not be installed."""
    words = [sys.executable, "-c", CODE, str(tmp_path), *HEAVY]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2:] == ["", ""], done.stdout
