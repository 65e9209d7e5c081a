#!/usr/bin/env bash
# Runs this site's SuperNode and starts it again when it ends or loses the server, until SIGTERM or SIGINT. Called by
# start.sh, or by systemd. The SuperNode notes each contact with the server in run/contact; this script looks there.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. ./site.env
umask 077
echo $$ >run/supervise.pid
export PATH="$PWD/run/bin:$PWD/.venv/bin:$PATH" FLWR_HOME="$PWD/state/flwr"
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 PYTHONUNBUFFERED=1
export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.2
export NO_PROXY="127.0.0.1,localhost${NO_PROXY:+,$NO_PROXY}"
export no_proxy=$NO_PROXY

# separate_users: the SuperNode runs as the owner of the key, the client process as CLIENT_USER, in the folder client/.
separate_users() {
  local user client_id=$CLIENT_USER group=$CLIENT_USER groups=--clear-groups
  user=$(stat -c %u key)
  if [[ ! $CLIENT_USER =~ ^[0-9]+$ ]]; then
    client_id=$(id -u "$CLIENT_USER") && group=$(id -g "$CLIENT_USER") && groups=--init-groups || exit 2
  fi
  [ "$client_id" != "$user" ] || { echo "supervise: CLIENT_USER owns the key: give the kit to another user" >&2; exit 2; }
  as_node=(setpriv --reuid "$user" --regid "$(stat -c %g key)" --clear-groups)
  as_client=(setpriv --reuid "$client_id" --regid "$group" "$groups"
    env "FLWR_HOME=$PWD/client/flwr" "HOME=$PWD/client")
  caller=(--caller "$user")
  export FEDSIM_CLIENT=$PWD/client FEDSIM_CACHE="${FEDSIM_CACHE:-$PWD/client/cache}"
  STATE_DIR=${STATE_DIR:-$PWD/client/state}
  mkdir -p client
  chmod 711 . client # to be passed through, not listed
  for folder in client client/run client/state client/cache client/flwr; do
    [ -e "$folder" ] || mkdir "$folder"
    chown -h "$client_id:$group" "$folder"
  done
  chmod 711 client/run
  mkdir -p run/bin state/flwr
  chown -h "$user" run run/bin state state/flwr
  "${as_client[@]}" test -x "$(command -v fedsim)" ||
    { echo "supervise: $CLIENT_USER cannot run $(command -v fedsim): let it read the virtual environment" >&2; exit 2; }
}

as_node=() as_client=() caller=() FEDSIM_CLIENT=""
[ -z "${CLIENT_USER:-}" ] || separate_users
export FEDSIM_CACHE="${FEDSIM_CACHE:-$PWD/cache}"
STATE_DIR=${STATE_DIR:-$PWD/state}
[ -n "$FEDSIM_CLIENT" ] || mkdir -p "$STATE_DIR"
mkdir -p state/flwr run/bin
config="site='$SITE' domain='$DOMAIN' role='$ROLE' state-dir='$STATE_DIR'"
[ -z "$DATA_DIR" ] || config+=" data-dir='$DATA_DIR'"
[ ! -e peers ] || config+=" peers='$PWD/peers'" # the sites' public keys, for secure_mean
[ -z "${NODE_CONFIG:-}" ] || config+=" $NODE_CONFIG" # the site's own values, e.g. dp-clip=0.5 (SECURITY-DETAILS.md)

child="" client="" watcher="" stopping=""
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

# server_listens: a TCP connection to the server can be made.
server_listens() {
  local host=${SUPERLINK%:*}
  host=${host#[} host=${host%]}
  timeout 5 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$host" "${SUPERLINK##*:}" 2>/dev/null
}

# end PID: politely, then for good.
end() {
  kill -TERM "$1" 2>/dev/null
  moment
  moment
  kill -KILL "$1" 2>/dev/null
}

# watch PID: the SuperNode polls or sends heartbeats all the time. When it has not reached the server for
# SILENT_SECONDS although the server listens, it hangs: it is ended, so that it is started again.
# A SuperNode without a first contact yet may also have broken off in the TLS handshake, after which it stays.
watch() {
  trap 'kill "$!" 2>/dev/null; exit' TERM
  moment() { sleep "${WATCH_SECONDS:-10}" & wait "$!"; }
  local begin=$SECONDS age
  while moment && kill -0 "$1" 2>/dev/null; do
    if [ -e run/contact ]; then
      age=$(($(date +%s) - $(stat -c %Y run/contact)))
      [ "$age" -ge -5 ] || touch -d "-61 seconds" run/contact # the clock was set back: count from here
    else
      age=$((SECONDS - begin))
    fi
    if [ "$age" -ge "${SILENT_SECONDS:-120}" ] && server_listens; then
      say "no contact with $SUPERLINK for $age s although it listens: the SuperNode is started again"
      end "$1"
      return
    fi
    if grep -q "SSL/TLS handshake error" run/attempt.log; then
      moment
      end "$1"
      return
    fi
  done
}

# keep_client: the process that does the client's work (fedsim/deploy/warm_client.py), started again when it ends.
keep_client() {
  trap 'kill -TERM "$!" 2>/dev/null; exit' TERM
  while kill -0 $$ 2>/dev/null; do # while the supervisor lives
    "${as_client[@]}" fedsim deploy client "${FEDSIM_CLIENT:-.}" --parent $$ "${caller[@]}" &
    wait "$!"
    sleep 1 &
    wait "$!"
  done
}

if [ "${WARM:-yes}" = yes ] || [ -n "$FEDSIM_CLIENT" ]; then
  keep_client >>run/client.log 2>&1 </dev/null &
  client=$!
fi

failures=0 pause=$RETRY_SECONDS
while [ -z "$stopping" ]; do
  begin=$SECONDS
  rm -f run/contact
  "${as_node[@]}" fedsim deploy supernode . --superlink "$SUPERLINK" --root-certificates ca.crt --auth-supernode-private-key key \
    --port "$PORT" --node-config "$config" > >(exec tee -i run/attempt.log) 2>&1 &
  child=$!
  echo "$child" >run/supernode.pid
  watch "$child" &
  watcher=$!
  await
  kill "$watcher" 2>/dev/null
  [ -z "$stopping" ] || break
  sleep 0.5 # tee may still be writing
  if [ $((SECONDS - begin)) -ge 60 ] || [ -e run/contact ]; then
    failures=0
  fi
  # After a good while the first wait is the short one again.
  [ $((SECONDS - begin)) -lt 600 ] || pause=$RETRY_SECONDS
  failures=$((failures + 1)) limit=$TRIES
  if grep -qE '\[code: 2990\]' run/attempt.log; then
    reason="$(grep -m 1 -oE 'the clock of this machine.*' run/attempt.log)"
    limit=0
  elif grep -qE '\[code: 200[14]\]' run/attempt.log; then
    reason="the server refuses this site's key: it is not registered, or another SuperNode with it counts as online (for 60 s)"
    [ "$failures" -gt 12 ] || pause=$RETRY_SECONDS
  elif grep -q "certificate has expired" run/attempt.log; then
    reason="the certificate of $SUPERLINK has expired: the operator calls fedsim deploy renew"
    limit=0
  elif grep -q "certificate is not yet valid" run/attempt.log; then
    reason="the certificate of $SUPERLINK is not valid yet: the clock of this machine or of the server is wrong"
    limit=0
  elif grep -q CERTIFICATE_VERIFY_FAILED run/attempt.log; then
    reason="the certificate of $SUPERLINK does not fit ca.crt or that name"
    limit=$((TRIES < 3 ? TRIES : 3))
  elif [ "$code" -gt 128 ]; then
    reason="the SuperNode was killed (signal $((code - 128)))"
    limit=0
  elif [ -e run/contact ]; then
    reason="the SuperNode lost the server: $(grep -v '^ *$' run/attempt.log | grep -iE 'error|refused' | tail -n 1)"
    limit=0
  else
    reason="the SuperNode ended: $(grep -v '^ *$' run/attempt.log | tail -n 1)"
  fi
  if [ "$limit" -gt 0 ] && [ "$failures" -ge "$limit" ]; then
    say "gave up after $failures attempts: $reason"
    break
  fi
  say "next attempt in $pause s: $reason"
  sleep "$pause" &
  child=$!
  await
  pause=$((pause * 2 > LONGEST_RETRY_SECONDS ? LONGEST_RETRY_SECONDS : pause * 2))
done
[ -z "$client" ] || kill -TERM "$client" 2>/dev/null
[ -n "$stopping" ] || exit 1
say "stopped"
