"""Runs all measurements of docs/speed.md in order, resumes where it was stopped, and writes one page.

    python benchmarks/all.py --pacs FOLDER_OF_PACS [--folder benchmarks] [--only NAME ...] [--again]

Each measurement is one script with a log of its own in the folder. One that has ended well on this commit is not run
again, unless `--again` is given. The page `measurements.md` has what each of them printed. The machine should do
nothing else for the 90 minutes that all of them take on two cores.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
import trials  # noqa: E402  (the long trials are run and written down in the same way)

PACS = "PACS"  # stands for the folder in a command
SCRIPTS = {
    "overhead of digits": "overhead.py --repeats 9",
    "overhead of 20 rounds of digits": "overhead.py --rounds 20 --repeats 5",
    "overhead of ResNet-18": "overhead.py --model resnet18 --repeats 3",
    "30 clients": "thirty_clients.py --ways one-process,default --repeats 3",
    "networks that hardly compute": "tiny_rounds.py --repeats 5",
    "5 clients of ResNet-18": "thirty_clients.py --model resnet18 --rounds 3 --repeats 3 "
    "--ways one-process,default,two-threads",
    "1000 clients of small pictures": "thirty_clients.py --model cifar --rounds 3 --repeats 1",
    "sweep of digits": "sweep_cells.py --repeats 2",
    "sweep of PACS": f"sweep_cells.py --config pacs --preset imagenet-small --root {PACS} --methods fedavg "
    "--targets photo,sketch --set data.normalize=imagenet --set train.optimizer=sgd",
    "runtimes": "runtimes.py --repeats 2",
    "cold start": "cold_start.py",
    "steps": "steps.py --threads 1 --methods all",
    "steps on masks": "steps.py --methods fedavg,elcfs --threads 1 --data digit-masks --backbone unet-small "
    "--size 48 --batch 16 --bottleneck 0",
    "banks": f"banks.py --root {PACS}",
    "images": f"data_path.py --root {PACS}",
    "large tables": "large_table.py",
    "averages": "aggregation.py",
    "memory of the server": "server_memory.py",
    "secure aggregation": "secure_mean.py",
    "many clients": "clients_scale.py --repeats 2 --runtimes inline,flower",
    "100,000 clients of which 100 are drawn": "clients_scale.py --clients 1000,10000,100000 --modes 100",
    "deployed rounds": "deployed.py --rounds 16",
    "long runs": "soak.py",
}


def table(pacs: str) -> trials.Table:
    """{name: command}; without a folder of PACS those that need it are left out."""
    words = {name: script.split() for name, script in SCRIPTS.items() if pacs or PACS not in script.split()}
    return {
        name: (sys.executable, f"benchmarks/{script}", *(pacs if word == PACS else word for word in rest))
        for name, (script, *rest) in words.items()
    }


def main() -> int:
    """Run what has not ended well on this commit; exit code 1 when one failed."""
    words = trials.arguments(__doc__, "benchmarks")
    words.add_argument("--pacs", default="", help="folder that holds PACS")
    asked = words.parse_args()
    return trials.run(table(asked.pacs), asked, "Measurements", "measurements.md", whole=True)


if __name__ == "__main__":
    sys.exit(main())
