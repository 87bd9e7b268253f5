#!/usr/bin/env bash
# Install Chromium on Debian, as root, if there is no browser. Tests open the report and the documentation in it.
set -euo pipefail

for browser in chromium chromium-browser google-chrome; do
  ! command -v "$browser" >/dev/null || exit 0
done
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "$0: found no browser (chromium or google-chrome); install one, or run this script as root on Debian" >&2
  exit 1
fi
install=(apt-get -o DPkg::Lock::Timeout=600 install -y -q --no-install-recommends chromium)
export DEBIAN_FRONTEND=noninteractive
"${install[@]}" >/dev/null 2>&1 || { apt-get update -q >/dev/null && "${install[@]}" >/dev/null; }
