"""What the processes of a run, cold ones of a site too, and of `fedsim predict` do not import, to start faster."""

import subprocess
import sys

HEAVY = ("ray", "torchvision", "torch._dynamo", "flwr.simulation", "scipy", "sklearn", "matplotlib")

CODE = """
import sys
from pathlib import Path
from PIL import Image
sys.modules["ray"] = None
from fedsim.export.verbs import show_predictions
from fedsim.settings.experiment import read_experiment
from fedsim.runtime.launch import launch
folder = launch(read_experiment("digits", ["train.rounds=1", "data.fraction=0.05", "run.output=" + sys.argv[1]]))
Image.new("L", (28, 28)).save("one.png")
show_predictions(folder, [Path("one.png")], "best", None)
print(*(name for name in sys.argv[2:] if sys.modules.get(name) is not None))
"""


def test_a_run_of_digits_and_its_predictions_import_nothing_heavy(tmp_path):
    """torchvision takes two seconds, PyTorch's compiler one; Ray and Flower's simulation need not be installed."""
    words = [sys.executable, "-c", CODE, str(tmp_path), *HEAVY]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2:] == ["", ""], done.stdout
