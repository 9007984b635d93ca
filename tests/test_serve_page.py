"""The live page in a browser: cards, buttons, an image to try, and no requests to other servers."""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import LOW_CONTRAST, chromium, get_log, get_requests, set_view
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.ui import WebDriverWait
from serving import SIZE, TIMEOUT, Client, make_images, make_png, make_tent, serve_in_thread

from ctta.guard import Guarded
from ctta.serve import Service, Tokens
from ctta.serve.store import StreamSlot

TOKENS = Tokens("i" * 20, "a" * 20)
CLASSES = ["bird", "cat", "dog", "frog", "ship"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    folder = tmp_path_factory.mktemp("page")
    return Service(
        Guarded(make_tent(folder)),
        folder / "state",
        image_size=SIZE,
        class_names=CLASSES,
        window_size=0,
        num_answers=100,
        keep_images=True,
    )


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[Client]:
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
    own = (client.address, f"blob:{client.address}", "data:,")
    assert [address for address in requested if not address.startswith(own)] == []
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


def test_answers_of_the_source_are_beside_those_of_the_stream(browser: webdriver.Chrome, client: Client) -> None:
    until(browser, f"return {card('camera10')}.querySelectorAll('.compared tbody tr').length > 0")
    answers = client.json("GET", "/streams/camera10/answers")
    assert answers["total"] == 48 and 0 <= answers["agreement"] <= 1
    assert sum(map(sum, answers["counts"])) == 48
    shown = browser.execute_script(
        f"return [...{card('camera10')}.querySelectorAll('.compared tbody tr')]"
        ".map(row => [...row.children].map(cell => cell.textContent))"
    )
    labels = [each["label"] for each in answers["classes"]]
    assert set(labels) <= set(CLASSES)
    assert [[row[0], *map(int, row[1:])] for row in shown] == [
        [label, *counts] for label, counts in zip(labels, answers["counts"], strict=True)
    ]
    caption = f"return {card('camera10')}.querySelector('caption').textContent"
    assert browser.execute_script(caption) == "last 48 answers; rows: source, columns: adapted"
    assert client.call("GET", "/streams/nobody/answers").status_code == 404


def test_the_last_image_is_shown(browser: webdriver.Chrome, client: Client) -> None:
    until(browser, f"return {card('camera10')}.querySelector('.image').naturalWidth === {SIZE[1]}")
    assert browser.execute_script(f"return {card('camera10')}.querySelector('.image').alt") == "last image of camera10"
    image = Image.open(io.BytesIO(client.call("GET", "/streams/camera10/image").content))
    expected = make_images(8, 5)[-1].mul(255).round().byte().permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(np.asarray(image), expected)


def test_images_are_not_kept_unless_asked(tmp_path: Path) -> None:
    service = Service(make_tent(tmp_path), tmp_path / "state", image_size=SIZE, window_size=0)
    with serve_in_thread(service) as client:
        client.infer("a", make_images(4))
        for path in ("image", "answers"):
            assert client.call("GET", f"/streams/a/{path}").status_code == 409
        assert client.json("GET", "/streams/a")["last_image"] is False


@pytest.fixture
def many(service: Service, client: Client, browser: webdriver.Chrome) -> Iterator[None]:
    """Add ten thousand streams on disk, of which three are alarmed and one is frozen."""
    summary = client.json("GET", "/streams/camera2")
    names = [f"line-{number}" for number in range(10_000)]
    for number, name in enumerate(names):
        score = {7000: 1.1, 7001: 2.0, 7002: 1.5}.get(number, 0.2)
        changed = {"name": name, "collapse_score": score, "frozen": number == 42, "used_at": number, "feedback": None}
        service.store.slots[name] = StreamSlot(name, {**summary, **changed})
    yield
    for name in names:
        del service.store.slots[name]
    browser.execute_script("document.getElementById('clear').click()")
    until(browser, "return document.querySelectorAll('article').length === 3")


def names_of_cards(browser: webdriver.Chrome) -> list[str]:
    found: list[str] = browser.execute_script(
        "return [...document.querySelectorAll('article')].map(x => x.dataset.stream)"
    )
    return found


@pytest.mark.usefixtures("many")
def test_ten_thousand_streams_are_paged_filtered_and_sorted_by_alarm(browser: webdriver.Chrome) -> None:
    until(browser, "return document.getElementById('range').textContent === '1\u201324 of 10,003'")
    assert names_of_cards(browser)[:6] == ["line-7001", "line-7002", "line-7000", "camera2", "camera10", "line-0"]
    assert browser.execute_script("return document.getElementById('previous').disabled") is True
    totals = browser.find_element(By.ID, "totals").text.replace("\n", " ")
    assert "alarms 3" in totals
    browser.find_element(By.ID, "next").send_keys(Keys.ENTER)
    until(browser, "return document.getElementById('range').textContent === '25\u201348 of 10,003'")
    assert "line-7001" not in names_of_cards(browser)
    assert (
        browser.execute_script("return document.getElementById('announcements').textContent")
        == "streams 25\u201348 of 10,003"
    )
    browser.find_element(By.TAG_NAME, "body").send_keys("/")  # the shortcut
    browser.switch_to.active_element.send_keys("INE-700")
    until(browser, "return document.getElementById('count').textContent === '11 of 10,003'")
    assert names_of_cards(browser)[:4] == ["line-7001", "line-7002", "line-7000", "line-700"]
    assert browser.execute_script("return getComputedStyle(document.getElementById('pages')).display") == "none"
    Select(browser.find_element(By.ID, "order")).select_by_value("name")
    until(browser, "return document.querySelector('article').dataset.stream === 'line-700'")
    Select(browser.find_element(By.ID, "order")).select_by_value("alarm")
    Select(browser.find_element(By.ID, "state")).select_by_value("frozen")
    until(browser, "return !document.getElementById('none').hidden")
    assert names_of_cards(browser) == []


def test_cards_keep_the_focus_and_have_names(browser: webdriver.Chrome) -> None:
    button = browser.find_element(By.CSS_SELECTOR, "[data-stream='ward.A'] [data-action=reset]")
    browser.execute_script("arguments[0].focus(); document.getElementById('order').value = 'recent'; refresh()", button)
    until(browser, "return document.getElementById('order').value === 'recent'")
    browser.execute_async_script("refresh().then(arguments[0])")
    assert browser.execute_script("return document.activeElement === arguments[0]", button)
    browser.execute_async_script("document.getElementById('order').value = 'alarm'; refresh().then(arguments[0])")
    for article in browser.find_elements(By.TAG_NAME, "article"):
        assert article.accessible_name == article.get_attribute("data-stream")
        chart = article.find_element(By.CSS_SELECTOR, "svg.confidence")
        assert "now " in chart.accessible_name
    unnamed = browser.execute_script(
        "return [...document.querySelectorAll('input, select, button')].filter(x => x.getClientRects().length)"
    )
    assert len(unnamed) > 10 and all(element.accessible_name for element in unnamed)


def test_every_control_is_reached_by_the_keyboard(browser: webdriver.Chrome) -> None:
    browser.execute_script("document.activeElement.blur(); window.scrollTo(0, 0)")
    seen: list[str] = []
    for _ in range(60):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        seen.append(
            browser.execute_script("return (x => x.id || x.dataset.action || x.tagName)(document.activeElement)")
        )
    for control in (
        "file",
        "stream",
        "adapt",
        "search",
        "state",
        "order",
        "stream-camera2",
        "SUMMARY",
        "reset",
        "rollback",
    ):
        assert control in seen
    assert seen.index("search") < seen.index("stream-camera2")
