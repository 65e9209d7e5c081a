"""The app bundles of `fedsim run` and `fedsim deploy check`. They contain no code, only names of the installed apps."""

from fedsim.flower.processes import APP

RUN = {
    **APP,
    "tool": {
        "flwr": {
            "app": {
                **APP["tool"]["flwr"]["app"],
                "components": {"serverapp": "fedsim.deploy.server_app:app", "clientapp": "fedsim.client_app:app"},
            }
        }
    },
}
CHECK = {
    "project": {"name": "fedsim-check", "version": "0.1.0", "description": "Asks the sites", "license": "Apache-2.0"},
    "tool": {
        "flwr": {
            "app": {
                "publisher": "fedsim",
                "components": {
                    "serverapp": "fedsim.deploy.check_app:server",
                    "clientapp": "fedsim.deploy.check_app:client",
                },
                "config": {"experiment": "", "report": "", "wait": 0.0, "packages": ""},
            }
        }
    },
}
