"""Headless Chromium for tests of pages."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


#: Visible texts and lines with too little contrast to their background, and the number of those checked.
LOW_CONTRAST = """
const channels = color => color.match(/[\\d.]+/g).map(Number);
const luminance = color => channels(color).slice(0, 3).map(c => c / 255)
  .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, place) => sum + c * [0.2126, 0.7152, 0.0722][place], 0);
const background = element => {
  for (; element; element = element.parentElement) {
    const color = getComputedStyle(element).backgroundColor;
    if ((channels(color)[3] ?? 1) > 0) return color;
  }
  return "rgb(255, 255, 255)";
};
const contrast = (one, other) => {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
};
const found = [];
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
let count = 0;
while (texts.nextNode()) {
  const text = texts.currentNode.data.trim(), element = texts.currentNode.parentElement;
  if (!text || !element.getClientRects().length) continue;
  const style = getComputedStyle(element);
  const value = contrast(element.closest("svg") ? style.fill : style.color, background(element));
  count += 1;
  if (!(value >= 4.5)) found.push([text, value]);
}
for (const line of document.querySelectorAll("svg g[id*=line2d] > path")) {
  const style = getComputedStyle(line);
  if (style.stroke === "none" || style.strokeOpacity < 1 || style.stroke === getComputedStyle(faint).color) continue;
  count += 1;
  if (!(contrast(style.stroke, background(line)) >= 3)) found.push([line.parentElement.id, style.stroke]);
}
return [count, found];
"""


@contextmanager
def chromium(profile: Path) -> Iterator[webdriver.Chrome]:
    """Start a browser that records its console and its requests."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert binary and driver, "chromium and chromedriver are not installed: run make browser"
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield chrome
    finally:
        chrome.quit()


def set_view(browser: webdriver.Chrome, *, width: int = 1280, theme: str = "light", media: str = "") -> None:
    """Set the size of the screen, and the color scheme and medium that the reader prefers."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})


def get_log(browser: webdriver.Chrome, name: str) -> list[dict[str, Any]]:
    """Return the entries of a log since the last call."""
    untyped: Any = browser  # selenium does not annotate this method
    entries: list[dict[str, Any]] = untyped.get_log(name)
    return entries


def get_requests(browser: webdriver.Chrome) -> list[str]:
    """Return the URLs requested since the last call."""
    events: list[dict[str, Any]] = [
        json.loads(entry["message"])["message"] for entry in get_log(browser, "performance")
    ]
    return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
