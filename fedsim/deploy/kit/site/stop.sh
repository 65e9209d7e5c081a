#!/usr/bin/env bash
# Stops this site's SuperNode within a minute; it leaves the federation, so that start.sh works again at once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

if [ ! -e run/lock ] || flock -n run/lock true; then
  echo "not running"
  exit 0
fi

# ours NAME: its process id, if that process lives and belongs to this kit (ids are used again).
ours() {
  local pid
  pid=$(cat "run/$1.pid" 2>/dev/null) && [ "$(readlink "/proc/$pid/cwd")" = "$(pwd -P)" ] && echo "$pid"
}

if pid=$(ours supervise) || pid=$(ours supernode); then kill -TERM "$pid"; fi
if ! flock -w 40 run/lock true; then
  for name in supervise supernode; do
    if pid=$(ours "$name"); then kill -KILL "$pid"; fi
  done
  flock -w 20 run/lock true || { echo "stop.sh: the SuperNode does not end; see run/supernode.pid" >&2; exit 1; }
fi
echo "stopped"
