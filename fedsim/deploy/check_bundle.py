"""The app bundle of `fedsim deploy check`: it holds no code, and names the apps of the installed fedsim."""

APP = {
    "project": {"name": "fedsim-check", "version": "0.1.0", "description": "Asks the sites", "license": "Apache-2.0"},
    "tool": {
        "flwr": {
            "app": {
                "publisher": "fedsim",
                "components": {
                    "serverapp": "fedsim.deploy.check_app:server",
                    "clientapp": "fedsim.deploy.check_app:client",
                },
                "config": {"experiment": "", "report": "", "wait": 0.0},
            }
        }
    },
}
