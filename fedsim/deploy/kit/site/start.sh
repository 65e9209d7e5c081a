#!/usr/bin/env bash
# Starts this site's SuperNode in the background and keeps it running until stop.sh; --foreground stays (systemd, Docker).
# --unit prints a systemd unit that starts this site with the machine:
#     ./start.sh --unit | sudo tee /etc/systemd/system/fedsim-SITE.service; sudo systemctl enable --now fedsim-SITE
# Called again, it tells whether the site is connected: exit code 0 if it is, 1 if not.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. ./site.env
umask 077
mkdir -p run

fail() { echo "start.sh: $*" >&2; exit 2; }

# Flower reads these folders between apostrophes, and would silently leave out what follows another one (NODE_CONFIG).
for folder in "$PWD" "$DATA_DIR" "${STATE_DIR:-}"; do
  case $folder in
    *[\'\"\`\$\\]* | *$'\n'*) fail "the folder $folder has an apostrophe, a quote, a backtick, a dollar sign, a backslash or" \
      "a line end in its name, which Flower cannot take: rename it (the kit's folder, DATA_DIR or STATE_DIR in site.env)" ;;
  esac
done

if [ "${1:-}" = --unit ]; then
  cat <<UNIT
[Unit]
Description=fedsim site $SITE
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
User=$([ -n "${CLIENT_USER:-}" ] && echo root || id -un)
ExecStart="$PWD/start.sh" --foreground
Restart=always
RestartSec=30
StandardOutput=append:$PWD/run/supernode.log
StandardError=inherit
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=full

[Install]
WantedBy=multi-user.target
UNIT
  exit 0
fi

# contact_age: seconds since the last contact with the server; nothing before the first one.
contact_age() { [ ! -e run/contact ] || echo $(($(date +%s) - $(stat -c %Y run/contact))); }

last_word() { grep "supervise:" run/supernode.log 2>/dev/null | tail -n 1 | sed 's/.*supervise: //' || true; }

# The kit brings the wheel (`wheel` in federation.toml): installed here, once, where there is no fedsim yet.
if ! PATH="$PWD/.venv/bin:$PATH" command -v fedsim >/dev/null && ls ./*.whl >/dev/null 2>&1; then
  echo "installing fedsim into $PWD/.venv; this takes some minutes" >&2
  export PIP_DISABLE_PIP_VERSION_CHECK=1
  [ -x .venv/bin/pip ] || python3 -m venv .venv || fail "python3 -m venv failed (Debian: python3-venv)"
  if [ -n "${TORCH_INDEX:-}" ]; then
    .venv/bin/pip install --quiet torch torchvision --index-url "$TORCH_INDEX" || fail "pip could not install PyTorch"
  fi
  .venv/bin/pip install --quiet ./*.whl || fail "pip could not install fedsim"
fi
for tool in fedsim flower-supernode flock; do
  PATH="$PWD/.venv/bin:$PATH" command -v "$tool" >/dev/null || fail "$tool is not installed here; see README.md"
done
[ -z "$DATA_DIR" ] || [ -e "$DATA_DIR" ] || fail "nothing at $DATA_DIR; put the data there or change DATA_DIR in site.env"
if [ ! -e key ]; then # a key that is made at the site never travels
  PATH="$PWD/.venv/bin:$PATH" fedsim deploy key "$SITE" key key.pub
  echo "$SITE has made its key; give the operator this line (fedsim deploy register --site $SITE --key FILE):"
  cat key.pub
fi
if [ -n "${CLIENT_USER:-}" ] && [ "$(id -u)" != 0 ]; then
  fail "CLIENT_USER in site.env needs root, who starts the SuperNode and the client process as their users: sudo $0"
fi
if ! flock -n run/lock true; then
  age=$(contact_age)
  if [ -n "$age" ] && [ "$age" -ge -5 ] && [ "$age" -le 60 ]; then
    echo "$SITE is running and connected to $SUPERLINK (last contact $age s ago)"
    exit 0
  fi
  since="it has not reached $SUPERLINK yet"
  [ -z "$age" ] || since="its last contact with $SUPERLINK was $age s ago"
  [ -z "$age" ] || [ "$age" -ge -5 ] || since="its last contact with $SUPERLINK is in the future: this machine's clock was set back"
  said=$(last_word)
  echo "$SITE is running, but $since; it keeps trying${said:+ ($said)}; log: $PWD/run/supernode.log" >&2
  exit 1
fi
if [ "${1:-}" = --foreground ]; then
  exec flock -n -F run/lock ./supervise.sh
fi
touch run/supernode.log
rm -f run/contact
before=$(stat -c %s run/supernode.log)
setsid flock -n -F run/lock ./supervise.sh >>run/supernode.log 2>&1 </dev/null &
for _ in $(seq 90); do # tells how the first attempt went; the attempts go on behind it
  sleep 1
  [ ! -e run/contact ] || { echo "$SITE is connected to $SUPERLINK"; exit 0; }
  said=$(tail -c "+$((before + 1))" run/supernode.log)
  case $said in
    *"supervise:"*) echo "$SITE: $(grep -m 1 "supervise:" <<<"$said")" >&2; exit 1 ;;
  esac
done
echo "$SITE has not reached $SUPERLINK yet and keeps trying; log: $PWD/run/supernode.log" >&2
exit 1
