#!/usr/bin/env bash
# Starts this site's SuperNode in the background and keeps it running until stop.sh; --foreground stays (systemd, Docker).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. ./site.env
umask 077
mkdir -p run

fail() { echo "start.sh: $*" >&2; exit 2; }

for tool in flower-supernode flock; do
  PATH="$PWD/.venv/bin:$PATH" command -v "$tool" >/dev/null || fail "$tool is not installed here; see README.md"
done
[ -z "$DATA_DIR" ] || [ -d "$DATA_DIR" ] || fail "no folder $DATA_DIR; put the data there or change DATA_DIR in site.env"
flock -n run/lock true || { echo "$SITE is running"; exit 0; }
if [ "${1:-}" = --foreground ]; then
  exec flock -n -F run/lock ./supervise.sh
fi
touch run/supernode.log
before=$(stat -c %s run/supernode.log)
setsid flock -n -F run/lock ./supervise.sh >>run/supernode.log 2>&1 </dev/null &
for _ in $(seq 90); do # tells how the first attempt went; the attempts go on behind it
  sleep 1
  said=$(tail -c "+$((before + 1))" run/supernode.log)
  case $said in
    *"SuperNode ID:"*) echo "$SITE is connected to $SUPERLINK"; exit 0 ;;
    *"supervise:"*) echo "$SITE: $(grep -m 1 "supervise:" <<<"$said")" >&2; exit 1 ;;
  esac
done
echo "$SITE has not reached $SUPERLINK yet and keeps trying; log: $PWD/run/supernode.log" >&2
exit 1
