#!/usr/bin/env bash
# Runs this site's SuperNode and starts it again when it ends, until SIGTERM or SIGINT. Called by start.sh.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. ./site.env
umask 077
echo $$ >run/supervise.pid
export PATH="$PWD/.venv/bin:$PATH" FLWR_HOME="$PWD/state/flwr" FEDSIM_CACHE="${FEDSIM_CACHE:-$PWD/cache}"
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 PYTHONUNBUFFERED=1
export NO_PROXY="127.0.0.1,localhost${NO_PROXY:+,$NO_PROXY}"
export no_proxy=$NO_PROXY
STATE_DIR=${STATE_DIR:-$PWD/state}
mkdir -p "$STATE_DIR" state/flwr
config="site='$SITE' domain='$DOMAIN' role='$ROLE' state-dir='$STATE_DIR'"
[ -z "$DATA_DIR" ] || config+=" data-dir='$DATA_DIR'"

child="" stopping=""
trap 'stopping=yes; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM INT

say() { echo "$(date '+%F %T') supervise: $*"; }

# await: until the child has ended, whatever signals come in between; its exit code in $code.
await() {
  while :; do
    wait "$child"
    code=$?
    kill -0 "$child" 2>/dev/null || break
  done
  child=""
}

# watch PID: Flower's SuperNode (1.41) ends its work when a connection breaks inside the TLS handshake, as when the server
# restarts, but its process stays. A moment after it said so it is ended, so that it is started again.
watch() {
  trap 'kill "$!" 2>/dev/null; exit' TERM
  moment() { sleep "${WATCH_SECONDS:-10}" & wait "$!"; }
  while moment && kill -0 "$1" 2>/dev/null; do
    if grep -q "SSL/TLS handshake error" run/attempt.log; then
      moment
      kill -TERM "$1" 2>/dev/null
      moment
      kill -KILL "$1" 2>/dev/null
      return
    fi
  done
}

failures=0 pause=$RETRY_SECONDS
while [ -z "$stopping" ]; do
  begin=$SECONDS
  flower-supernode --superlink "$SUPERLINK" --root-certificates ca.crt --auth-supernode-private-key key \
    --port "$PORT" --node-config "$config" > >(exec tee -i run/attempt.log) 2>&1 &
  child=$!
  echo "$child" >run/supernode.pid
  watch "$child" &
  watcher=$!
  await
  kill "$watcher" 2>/dev/null
  [ -z "$stopping" ] || break
  sleep 0.5 # tee may still be writing
  if [ $((SECONDS - begin)) -ge 60 ]; then
    failures=0 pause=$RETRY_SECONDS
  fi
  failures=$((failures + 1)) limit=$TRIES
  if grep -qE '\[code: 200[14]\]' run/attempt.log; then
    reason="the server refuses this site's key: it is not registered, or another SuperNode with it counts as online (for 60 s)"
    pause=$RETRY_SECONDS
  elif grep -q CERTIFICATE_VERIFY_FAILED run/attempt.log; then
    reason="the certificate of $SUPERLINK does not fit ca.crt or that name"
    limit=$((TRIES < 3 ? TRIES : 3))
  elif [ "$code" -gt 128 ]; then
    reason="the SuperNode was killed (signal $((code - 128)))"
  else
    reason="the SuperNode ended: $(grep -v '^ *$' run/attempt.log | tail -n 1)"
  fi
  if [ "$failures" -ge "$limit" ]; then
    say "gave up after $failures attempts: $reason"
    exit 1
  fi
  say "next attempt in $pause s: $reason"
  sleep "$pause" &
  child=$!
  await
  pause=$((pause * 2 > LONGEST_RETRY_SECONDS ? LONGEST_RETRY_SECONDS : pause * 2))
done
say "stopped"
