#!/usr/bin/env bash
# Install Chromium, in which tests open the report and the documentation, where there is no browser and this is root on Debian.
set -euo pipefail

for browser in chromium chromium-browser google-chrome; do
  ! command -v "$browser" >/dev/null || exit 0
done
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "expected a browser (chromium or google-chrome), or to be root with apt-get, which installs one; found neither" >&2
  exit 1
fi
order=(apt-get -o DPkg::Lock::Timeout=600 install -y -q --no-install-recommends chromium)
export DEBIAN_FRONTEND=noninteractive
"${order[@]}" >/dev/null 2>&1 || { apt-get update -q >/dev/null && "${order[@]}" >/dev/null; }
