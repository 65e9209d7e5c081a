"""The app bundles of `fedsim run` and `fedsim deploy check`. They contain no code, only names of the installed apps."""

from fedsim.common.values import JsonTable
from fedsim.flower.processes import APP


def _app(server: str, client: str, **changes: JsonTable) -> JsonTable:
    """A run's app with other components."""
    app = {**APP["tool"]["flwr"]["app"], "components": {"serverapp": server, "clientapp": client}, **changes}
    return {**APP, "tool": {"flwr": {"app": app}}}


RUN = _app("fedsim.deploy.server_app:app", "fedsim.apps.client:app")
CHECK = {
    **_app(
        "fedsim.deploy.check_app:server",
        "fedsim.deploy.check_app:client",
        config={"experiment": "", "report": "", "wait": 0.0, "packages": "", "statistics": 0},
    ),
    "project": {"name": "fedsim-check", "version": "0.1.0", "description": "Asks the sites", "license": "Apache-2.0"},
}
