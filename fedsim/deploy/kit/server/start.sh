#!/usr/bin/env bash
# Starts the federation's SuperLink and the proxy before it in the background, and registers the sites' keys.
# Called again, it does only what is missing. Logs and process ids are in run/, the database in state/.
# --foreground stays until the SuperLink ends, or SIGTERM ends everything (Docker).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. ./server.env
umask 077
export PATH="$PWD/.venv/bin:$PATH" FLWR_HOME="$PWD/state/flwr" PYTHONUNBUFFERED=1
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export NO_PROXY="127.0.0.1,localhost,$HOST${NO_PROXY:+,$NO_PROXY}"
export no_proxy=$NO_PROXY
mkdir -p run state/flwr

fail() { echo "start.sh: $*" >&2; exit 2; }

# launch NAME COMMAND...: in the background, in a session of its own; whoever holds run/NAME.lock is the one that runs.
# The log leaves out uvicorn's line per request: every site asks for work every three seconds.
launch() {
  local name=$1
  shift
  (
    flock -w 2 9 || { echo "$name is running"; exit 0; } # a process that is being killed holds it for a moment
    setsid bash -c 'echo $$ >"run/$0.pid"
      exec "$@" > >(exec grep --line-buffered -v uvicorn.access 9>&-) 2>&1' "$name" "$@" \
      >>"run/$name.log" 2>&1 </dev/null &
    echo "$name started"
  ) 9>"run/$name.lock"
}

for tool in flower-superlink fedsim flock; do
  command -v "$tool" >/dev/null || fail "$tool is not installed here; see README.md"
done
# Debian puts nginx into /usr/sbin, which a plain user's PATH lacks.
[ "$PROXY" = none ] || PATH="$PATH:/usr/sbin" command -v nginx >/dev/null || fail "nginx is not installed; see README.md"

launch superlink fedsim deploy superlink . --host "$HOST" --port "$PORT" \
  --ssl-ca-certfile ca.crt --ssl-certfile server.pem --ssl-keyfile server.key \
  --enable-supernode-auth --database state/superlink.db --disable-runtime-dependency-installation
if ! fedsim deploy register federation.toml; then
  tail -n 5 run/superlink.log >&2
  fail "the SuperLink did not take the sites' keys; its log is $PWD/run/superlink.log"
fi
if [ "$PROXY" = nginx ]; then
  # More open files than connections, two for each that is passed on; a hard limit below that is taken as it is.
  ulimit -n 16384 2>/dev/null || ulimit -n "$(ulimit -Hn)" || true
  PATH="$PATH:/usr/sbin" launch nginx nginx -p "$PWD/" -e run/nginx.log -c "$PWD/nginx.conf" -g "daemon off;"
  sleep 1
  ! flock -n run/nginx.lock true || fail "nginx did not start: $(tail -n 2 run/nginx.log)"
fi
echo "sites reach this server at $PUBLIC"
[ "${1:-}" = --foreground ] || exit 0
tail -q -n 0 -F run/superlink.log run/nginx.log 2>/dev/null &
trap "./stop.sh; kill $!; exit" TERM INT
flock run/superlink.lock true & # gets the lock when the SuperLink ends
wait $!
fail "the SuperLink has ended; its log is $PWD/run/superlink.log"
