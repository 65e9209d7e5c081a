"""Methods that need more of sites than FedAvg, deployed on loopback, have the numbers of the inline runtime."""

import pandas as pd
import pytest
from harness import SOURCES, TARGET, Loopback, run_folder, run_inline
from support import numbers

MASKS = {
    "data.dataset": "digit-masks",
    "data.domains": '["inverted", "noise", "shaded", "textured"]',
    "data.fraction": 0.05,
    "data.split": "random",
    "model.backbone": "unet-small",
    "run.target": "textured",
}
CASES = {  # method, settings, sources, target
    "a target that trains": ("fada", {}, SOURCES, TARGET),
    "segmentation": ("elcfs", MASKS, ("inverted", "noise", "shaded"), "textured"),
}


@pytest.mark.deployment
@pytest.mark.parametrize("case", CASES)
def test_deployed_as_inline(case, tmp_path):
    """All numbers of rounds.csv but bytes agree to 1e-5; a target's site is sent the model that it evaluates."""
    method, settings, sources, target = CASES[case]
    inline = run_inline(tmp_path / "inline", method, **settings)
    with Loopback(tmp_path, sources=sources, unseen=target) as federation:
        done = federation.run(tmp_path / "out", method, **settings)
    assert done.returncode == 0, done.stderr
    deployed = run_folder(tmp_path / "out", method, target)
    theirs, ours = numbers(inline / "rounds.csv"), numbers(deployed / "rounds.csv")
    columns = [name for name in theirs if not name.startswith("bytes")]
    pd.testing.assert_frame_equal(ours[columns], theirs[columns], rtol=0, atol=1e-5)
    clients = pd.read_csv(deployed / "clients.csv")
    assert set(clients["status"]) == {"ok"}
    assert set(clients["client"]) == {*sources, target}
