"""The resolved settings of a run, made once per process and passed on: experiment, recipe, data set, clients,
folder."""
