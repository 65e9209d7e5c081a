"""The inline runtime in several processes of this machine, which are forked when that saves time.

Each process has its own clients and a share of the cores for itself. It is a copy of this one: it has the data and
networks that are loaded here, so that its start takes some milliseconds. Personal state lies in the run's state folder,
where a process that replaces a dead one finds it. The numbers of a run do not depend on the processes, except for noise
that hides a model or an update: it is drawn anew each time, and differs from run to run anyway.
"""
