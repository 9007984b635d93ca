"""The live page in a browser: cards, buttons, an image to try, and no requests to other servers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import LOW_CONTRAST, chromium, get_log, get_requests, set_view
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait
from serving import SIZE, TIMEOUT, Client, make_images, make_png, make_tent, serve_in_thread

from ctta.guard import Guarded
from ctta.serve import Service, Tokens

TOKENS = Tokens("i" * 20, "a" * 20)
CLASSES = ["bird", "cat", "dog", "frog", "ship"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("page")
    service = Service(
        Guarded(make_tent(folder)),
        folder / "state",
        image_size=SIZE,
        class_names=CLASSES,
        window_size=0,
        num_answers=100,
    )
    with serve_in_thread(service, TOKENS) as client:
        for number in range(6):
            for name in ("camera2", "camera10", "ward.A"):
                client.infer(name, make_images(8, number))
        client.json("POST", "/streams/camera10/freeze")
        client.json("POST", "/streams/camera2/feedback", json={"ids": list(range(40)), "labels": ["cat"] * 40})
        yield client


@pytest.fixture(scope="module")
def browser(client: Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """Open the page and enter the infer token."""
    with chromium(tmp_path_factory.mktemp("profile")) as chrome:
        set_view(chrome)
        get_requests(chrome)  # drop those of the page that a new browser shows
        chrome.get(client.address)
        give_token(chrome, TOKENS.infer or "")
        until(chrome, "return document.querySelectorAll('article').length === 3")
        yield chrome


def until(browser: webdriver.Chrome, script: str) -> None:
    WebDriverWait(browser, TIMEOUT, poll_frequency=0.1).until(lambda chrome: chrome.execute_script(script))


def give_token(browser: webdriver.Chrome, token: str) -> None:
    until(browser, "return document.getElementById('token-dialog').open")
    browser.find_element(By.ID, "token").send_keys(token)
    browser.find_element(By.CSS_SELECTOR, "#token-dialog button.main").click()


def card(name: str) -> str:
    return f"document.querySelector('[data-stream=\"{name}\"]')"


def test_a_card_says_what_labels_say(browser: webdriver.Chrome) -> None:
    texts = [element.text for element in browser.find_elements(By.CSS_SELECTOR, "article .gain")]
    assert texts[0].startswith("adapting: ") and texts[0].endswith(" points by 40 labels") and texts[1:] == ["", ""]


def test_a_card_for_each_stream(browser: webdriver.Chrome) -> None:
    names = [element.text for element in browser.find_elements(By.CSS_SELECTOR, "article h3")]
    assert names == ["camera2", "camera10", "ward.A"]
    shown = browser.execute_script(f"return {card('camera2')}.innerText")
    for text in ("adapting", "confidence", "collapse score", "updates", "images", "events"):
        assert text in shown
    assert browser.execute_script(f"return {card('camera10')}.querySelector('.badge').textContent") == "frozen"
    line = browser.execute_script(f"return {card('camera2')}.querySelector('.confidence .line').getAttribute('d')")
    assert line.count("L") == 5  # six requests
    assert browser.execute_script(f"return {card('camera2')}.querySelector('.updates').textContent") == "6"


def test_no_foreign_requests_and_no_console_messages(browser: webdriver.Chrome, client: Client) -> None:
    requested = get_requests(browser)
    assert f"{client.address}/page.js" in requested
    assert [address for address in requested if not address.startswith((client.address, "data:,"))] == []
    messages = [entry for entry in get_log(browser, "browser") if "401" not in entry["message"]]
    assert messages == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_have_enough_contrast_and_fit(browser: webdriver.Chrome, theme: str) -> None:
    for width in (1280, 390):
        set_view(browser, width=width, theme=theme)
        browser.execute_script("window.faint ??= document.createElement('i')")
        count, found = browser.execute_script(LOW_CONTRAST)
        assert count > 40 and found == []
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    set_view(browser)


def test_an_image_is_classified_by_source_and_stream(browser: webdriver.Chrome, client: Client, tmp_path: Path) -> None:
    file = tmp_path / "image.png"
    file.write_bytes(make_png(3))
    before = client.json("GET", "/streams/ward.A")["images"]
    browser.execute_script("document.getElementById('stream').value = 'ward.A'")
    browser.find_element(By.ID, "file").send_keys(str(file))
    until(browser, "return document.querySelector('#adapted .prediction').textContent.length > 1")
    answer = client.json("POST", "/streams/ward.A/image?adapt=false&compare=true", data=make_png(3))
    for side, prediction in (("source", answer["source"]), ("adapted", answer)):
        text = browser.find_element(By.ID, side).text
        assert prediction["label"] in text and f"confidence {100 * prediction['confidence']:.1f} %" in text
    assert client.json("GET", "/streams/ward.A")["images"] == before  # only predicted
    other = tmp_path / "text.png"
    other.write_bytes(b"no image")
    browser.find_element(By.ID, "file").send_keys(str(other))
    until(browser, "return document.getElementById('error').textContent.includes('not a readable image')")


def test_buttons_prompt_for_the_admin_token_once(browser: webdriver.Chrome, client: Client) -> None:
    browser.execute_script(f"{card('camera2')}.querySelector('[data-action=reset]').click()")
    give_token(browser, TOKENS.admin or "")
    until(browser, f"return {card('camera2')}.querySelector('.updates').textContent === '0'")
    browser.execute_script(f"{card('camera2')}.querySelector('[data-action=freeze]').click()")
    until(browser, f"return {card('camera2')}.querySelector('.badge').textContent === 'frozen'")
    browser.execute_script(f"{card('ward.A')}.querySelector('[data-action=rollback]').click()")
    until(browser, f"return {card('ward.A')}.querySelector('ol').textContent.includes('rollback: requested')")
    kinds = [event["kind"] for event in client.json("GET", "/streams/camera2")["events"]]
    assert kinds[-2:] == ["reset", "freeze"]
