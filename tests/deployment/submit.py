"""An operator who submits another app: submit.py FEDERATION APP; prints the run's last state."""

import sys
import time

from fedsim.deploy.control import Control
from fedsim.deploy.federation import CONNECTION, read_federation

control = Control(read_federation(sys.argv[1]))
run = str(control.flwr("run", sys.argv[2], CONNECTION)["run-id"])
until, row = time.monotonic() + 150, {}
while time.monotonic() < until and not str(row.get("status")).startswith("finished"):
    time.sleep(2)
    row = control.flwr("list", CONNECTION, "--run-id", run)["runs"][0]
print(row)
