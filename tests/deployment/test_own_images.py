"""DEPLOY.md's example with own images: three sites hold them, and the server has none."""

import re
import subprocess
import tomllib
from pathlib import Path

import pandas as pd
import pytest
import tomli_w
from harness import FEDSIM, Loopback
from image_trees import write_tree

import fedsim.deploy


def example():
    """The two TOML files of the page's example, by their order."""
    page = (Path(fedsim.deploy.__file__).parent / "DEPLOY.md").read_text()
    section = page[page.index("## 7. A whole example") : page.index("## 8.")]
    return [tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", section, re.S)]


@pytest.mark.deployment
def test_the_server_needs_names_and_no_images(tmp_path):
    """Without the names of the classes the check says which lines are missing; with them it holds, and the run ends."""
    table, experiment = example()
    (tmp_path / "hospitals.toml").write_text(tomli_w.dumps(experiment))
    lacking = {**experiment, "data": {**experiment["data"], "domains": [], "classes": []}}
    (tmp_path / "lacking.toml").write_text(tomli_w.dumps(lacking))
    names = [site["name"] for site in table["sites"]]
    for number, name in enumerate(names):
        write_tree(tmp_path / "sites" / name, [name], experiment["data"]["classes"], 8, seed=100 * number)
    data = {name: str(tmp_path / "sites" / name) for name in names}
    with Loopback(tmp_path, sources=tuple(names[:2]), unseen=names[2], data=data, warm=False) as federation:

        def fedsim_here(*words):
            said = {"cwd": tmp_path, "env": federation.environment, "text": True, "capture_output": True}
            done = subprocess.run([*FEDSIM, *words, "--federation", "federation.toml"], timeout=900, **said)
            return done.returncode, done.stdout + done.stderr

        code, said = fedsim_here("deploy", "check", "lacking.toml")
        assert code == 2
        assert 'data.domains = ["bern", "geneva", "zurich"] and data.classes = ["benign", "malignant"]' in said
        code, said = fedsim_here("deploy", "check", "hospitals.toml")
        assert code == 0, said
        quick = ["--set", "train.rounds=1", "--set", "run.device=cpu", "--set", "run.timeout=600"]
        code, said = fedsim_here("run", "hospitals.toml", "--runtime", "deployment", "--method", "feddg-ga", *quick)
        assert code == 0, said
    rounds = pd.read_csv(tmp_path / "outputs/hospitals/feddg-ga/zurich/seed0/rounds.csv")
    assert list(rounds["round"]) == [0, 1]
