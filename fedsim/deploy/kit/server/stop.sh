#!/usr/bin/env bash
# Stops the proxy and the SuperLink of this kit, within a minute. What runs in them fails; the database stays.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# halt NAME: end the process that holds run/NAME.lock, politely at first.
halt() {
  local name=$1 pid
  if [ ! -e "run/$name.lock" ] || flock -n "run/$name.lock" true; then
    echo "$name is not running"
    return
  fi
  pid=$(cat "run/$name.pid")
  kill -TERM "$pid"
  if ! flock -w 20 "run/$name.lock" true; then
    kill -KILL "$pid"
    flock -w 10 "run/$name.lock" true || { echo "stop.sh: process $pid does not end" >&2; exit 1; }
  fi
  echo "$name stopped"
}

halt nginx
halt superlink
