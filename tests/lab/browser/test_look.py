"""Light and dark, wide and narrow, and what axe finds."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import AXE, PANELS
from .test_places import is_seen

pytestmark = pytest.mark.browser

SERIOUS = """async () => {
    const found = await axe.run(document, { resultTypes: ["violations"] });
    return found.violations
        .filter((each) => ["serious", "critical"].includes(each.impact))
        .map((each) => `${each.id}: ${each.nodes.map((node) => node.html).join(" | ")}`);
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_serious_fault(opened: Any, theme: str) -> None:
    lab = opened(color_scheme=theme)
    axe = AXE.read_text("utf-8")
    faults = {}
    for panel in PANELS:
        page = lab.open(panel, step=9, mask="causal", token=2, tile=1)
        page.evaluate(axe)
        found = page.evaluate(SERIOUS)
        if found:
            faults[panel] = found
    assert faults == {}


def background(page: Any) -> int:
    """How light the page is, from 0 to 255."""
    text = page.evaluate("getComputedStyle(document.querySelector('.qkv-lab')).backgroundColor")
    return int(text[text.index("(") + 1 :].split(",")[0])


def luminance(rgb: list[float]) -> float:
    shares = (0.2126, 0.7152, 0.0722)
    return sum(share * (c / 255) ** 2.2 for share, c in zip(shares, rgb, strict=True))


def test_both_themes_and_the_switch(opened: Any) -> None:
    for scheme, other in (("light", "dark"), ("dark", "light")):
        lab = opened(color_scheme=scheme)
        page = lab.open("start")
        assert (background(page) > 128) is (scheme == "light")
        switch = 'button[aria-label^="Theme"]'
        page.click(switch)
        while page.get_attribute(".qkv-lab", "data-theme") != other:
            page.click(switch)
        assert (background(page) > 128) is (other == "light")
        page.wait_for_function(f"() => location.hash.includes('theme={other}')")


def test_weights_differ_in_lightness(opened: Any) -> None:
    """Lightness goes one way with the weight, so that no kind of colour blindness hides it."""
    for scheme in ("light", "dark"):
        page = opened(color_scheme=scheme).open("heatmap")
        cells = page.eval_on_selector_all(
            'table[aria-label="weights matrix"] td[data-row]',
            """all => all.map((each) => [Number(each.querySelector("data").value),
                getComputedStyle(each).backgroundColor.match(/[0-9.]+/g).map(Number)])""",
        )
        lightness = [0.2126 * r + 0.7152 * g + 0.0722 * b for _, (r, g, b) in sorted(cells)]
        assert lightness == sorted(lightness, reverse=scheme == "light")


@pytest.mark.parametrize("width", [390, 320])
def test_nothing_is_wider_than_a_phone(opened: Any, width: int) -> None:
    """320 pixels are what a window of 1280 has at 400 %, which WCAG 2.1 asks for."""
    lab = opened(width=width, height=844)
    for panel in PANELS:
        page = lab.open(panel, step=9)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, panel


def test_a_long_word_leaves_room_for_numbers(opened: Any) -> None:
    """Compounds of German are such words, and so is text without spaces."""
    lab = opened(width=360, height=780)
    page = lab.open("start")
    page.fill(".tokens-edit input >> nth=1", "w" * 40)
    page.keyboard.press("Enter")
    ends = "all => all.map((each) => each.getBoundingClientRect().right)"
    for panel, places in {
        "pipeline": '[aria-label^="What"] tbody th, .choice label',
        "heatmap": '[aria-label="Rows in numbers"] tbody th',
        "tiles": ".keycell, .choice label",
    }.items():
        page.click(f'nav a[href="#{panel}"]')
        page.wait_for_selector(f'main[data-panel="{panel}"]')
        found = page.eval_on_selector_all(places, ends)
        assert len(found) >= 5, panel
        assert max(found) <= 320, panel
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, panel


def test_a_long_word_that_is_the_query_does_not_widen_the_page(opened: Any) -> None:
    """Titles and sentences name the query, and break within it where it is longer than a line."""
    lab = opened(width=360, height=780)
    page = lab.open("start")
    page.fill(".tokens-edit input >> nth=0", "w" * 40)
    page.keyboard.press("Enter")
    for panel in ("heatmap", "pipeline", "tiles", "code"):
        page.click(f'nav a[href="#{panel}"]')
        page.wait_for_selector(f'main[data-panel="{panel}"]')
        assert "w" * 40 in page.inner_text("main")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, panel


def test_weights_keep_their_colours_in_print(opened: Any) -> None:
    """Browsers leave backgrounds out, and what is pressed is of no use on paper."""
    page = opened().open("heatmap")
    page.emulate_media(media="print")
    cell = page.locator('table[aria-label="weights matrix"] td[data-row="1"] >> nth=0')
    adjust = "each => getComputedStyle(each).getPropertyValue('print-color-adjust')"
    assert cell.evaluate(adjust) == "exact"
    assert page.locator("html").evaluate(adjust) == "exact"
    for pressed in ("nav", ".tools", ".copy"):
        assert not page.locator(f"{pressed} >> nth=0").is_visible(), pressed
    assert page.locator("main").evaluate("each => each.getBoundingClientRect().left") < 40


def test_tables_are_whole_in_print(opened: Any) -> None:
    """Paper does not scroll: what a box that scrolls hides is lost. A4 has 718 pixels."""
    lab = opened()
    over = """() => [...document.querySelectorAll("main .wide > table, main pre")]
        .filter((each) => each.scrollWidth > each.clientWidth
            || each.getBoundingClientRect().right > innerWidth)
        .map((each) => each.innerText.slice(0, 40))"""
    for panel in PANELS:
        page = lab.open(panel, step=9)
        page.eval_on_selector_all("main details", "all => all.forEach((each) => each.open = true)")
        page.set_viewport_size({"width": 718, "height": 1000})
        page.emulate_media(media="print")
        assert page.evaluate(over) == [], panel
        page.emulate_media(media="screen")
        page.set_viewport_size({"width": 1280, "height": 900})


def test_a_dark_page_is_printed_light(opened: Any) -> None:
    """A sheet would be black otherwise. What is printed is the page at the end of the event."""
    page = opened(color_scheme="dark").open("inspect")
    page.wait_for_selector(".smallheads canvas")
    colours = """each => {
        dispatchEvent(new Event(each));
        const map = document.querySelector(".mapholder canvas").getContext("2d");
        const ink = getComputedStyle(document.querySelector(".qkv-lab")).color;
        return [ink, [...map.getImageData(150, 20, 1, 1).data]];
    }"""
    ink, map_ = page.evaluate(colours, "beforeprint")
    assert ink == "rgb(30, 28, 25)"
    assert min(map_) > 220
    page.evaluate(colours, "afterprint")
    page.wait_for_selector('.qkv-lab[data-theme="dark"]')


def test_the_frame_of_the_chosen_head_is_whole(opened: Any) -> None:
    """The pictures scroll in a box of their own, which cuts what is drawn outside of it."""
    page = opened().open("inspect")
    chosen = page.wait_for_selector('.smallheads button[aria-pressed="true"]')
    chosen.focus()
    spare = chosen.evaluate("""each => {
        const inner = each.getBoundingClientRect();
        const outer = each.closest(".wide").getBoundingClientRect();
        const { outlineWidth, outlineOffset } = getComputedStyle(each);
        const drawn = parseFloat(outlineWidth) + parseFloat(outlineOffset);
        const below = outer.bottom - inner.bottom;
        return [inner.left - outer.left, below].map((room) => room - drawn);
    }""")
    assert min(spare) >= 0


def test_the_top_of_a_phone(opened: Any) -> None:
    """One line of buttons; what is chosen, and what is in a bar, ends inside of it."""
    page = opened(width=390, height=844).open("exercises")
    tops = "all => all.map((each) => each.getBoundingClientRect().top)"
    assert len(set(page.eval_on_selector_all(".tools > button", tops))) == 1
    assert page.locator(".brand").evaluate("each => each.getClientRects().length") == 1
    page.locator("nav").evaluate("nav => nav.scrollTo(nav.scrollWidth, 0)")
    ends = "each => each.getBoundingClientRect().right"
    assert page.locator("nav li >> nth=-1").evaluate(ends) < 388


def test_a_menu_of_models_is_no_wider_than_its_bar(
    server_context: Any, server_address: str
) -> None:
    page = server_context.new_page()
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(server_address.partition("?")[0] + "#inspect")
    menu, bar = page.wait_for_selector(".shown select"), page.locator(".shown .examplebar")
    ends = "each => each.getBoundingClientRect().right"
    assert menu.evaluate(ends) < bar.evaluate(ends)
    page.close()


def test_code_formulas_and_the_board_fit_a_phone(opened: Any) -> None:
    lab = opened(width=390, height=844)
    code = lab.open("code").locator(".code")
    assert code.evaluate("code => code.scrollWidth <= code.clientWidth")
    page = lab.open("count")
    lines = "all => all.map((each) => each.getClientRects().length)"
    formulas = page.eval_on_selector_all('[aria-label="Operations"] tbody td:nth-child(2) *', lines)
    assert formulas
    assert set(formulas) == {1}
    tops = "all => all.map((each) => each.getBoundingClientRect().top)"
    rows = page.eval_on_selector_all(".board > *", tops)
    assert len(rows) == 9
    assert all(a == b for a, b in zip(rows[:8:2], rows[1:8:2], strict=True))


def test_the_arithmetic_of_a_cell_is_in_sight_on_a_phone(opened: Any) -> None:
    page = opened(width=390, height=844).open("heatmap")
    page.click('table[aria-label="weights matrix"] td[data-row="2"][data-column="1"]')
    page.wait_for_selector('.arithmetic h3:text-is("“sat” reads “cat”")')
    assert is_seen(page, ".arithmetic h3")


def test_numbers_of_the_board_keep_off_their_borders(opened: Any) -> None:
    page = opened(width=390, height=844).open("count", count=29)
    gaps = page.eval_on_selector_all(
        ".board tbody td[data-row]",
        """all => all.map((cell) => {
            const outer = cell.getBoundingClientRect();
            const inner = cell.firstChild.getBoundingClientRect();
            return Math.min(inner.left - outer.left, outer.right - inner.right);
        })""",
    )
    assert len(gaps) == 81
    assert min(gaps) >= 3


def test_the_steps_of_the_tour_stay_under_the_panels_on_a_phone(opened: Any) -> None:
    page = opened(width=390, height=844).open("tour")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(50)
        assert is_seen(page, ".tourbar button")
        assert page.evaluate(
            """() => document.querySelector("nav").getBoundingClientRect().bottom
                <= document.querySelector(".tourbar button").getBoundingClientRect().top"""
        )


def test_small_negative_weights_are_seen_in_the_dark(opened: Any) -> None:
    page = opened(color_scheme="dark").open("mechanisms", mech="differential")
    cells = page.eval_on_selector_all(
        'table[aria-label="Token mixing"] td[data-row]',
        """all => all.map((each) => [Number(each.querySelector("data").value),
            getComputedStyle(each).backgroundColor.match(/[0-9.]+/g).map(Number)])""",
    )
    paper = luminance([background(page)] * 3)
    negative = [rgb for weight, rgb in cells if weight < -0.04]
    assert negative
    for rgb in negative:
        assert (luminance(rgb) + 0.05) / (paper + 0.05) > 1.4
        assert rgb[0] > 2 * rgb[2]  # orange


def test_tables_of_the_tour_fit_a_desk(opened: Any) -> None:
    lab = opened(width=1440, height=900)
    for step in range(13):
        page = lab.open("tour", tour=step)
        wide = page.locator('[aria-label="In numbers"]')
        assert wide.evaluate("each => each.scrollWidth <= each.clientWidth"), step


def test_what_is_chosen_is_seen_where_colours_are_forced(opened: Any) -> None:
    """Backgrounds and shadows are gone then, as in Windows with a contrast theme."""
    lab = opened(forced_colors="active")
    line = """([place, index]) => {
        const all = [...document.querySelectorAll(place)];
        const { outlineStyle, outlineWidth } = getComputedStyle(all[index]);
        return `${outlineStyle} ${outlineWidth}`;
    }"""
    for panel, view, place, chosen, other in (
        ("pipeline", {"step": 3}, ".track button", 3, 2),
        ("pipeline", {"step": 3}, ".growing thead th", 4, 3),
        ("code", {"line": 3}, ".code > div", 3, 2),
        ("tiles", {"tile": 1}, ".keycell", 2, 1),
        ("tiles", {"tile": 1}, ".data tbody tr", 1, 0),
        ("mechanisms", {}, ".multiples button", 1, 0),
    ):
        page = lab.open(panel, **view)
        assert page.evaluate(line, [place, chosen]) == "solid 2px", (panel, place)
        assert page.evaluate(line, [place, other]).startswith("none"), (panel, place)
    # Lengths and colours that are numbers stay.
    bars = lab.open("scaling").locator(".plain .bar span >> nth=1")
    bare = lab.page.locator(".plain .bar >> nth=1")
    ground = "each => getComputedStyle(each).backgroundColor"
    assert bars.evaluate(ground) != bare.evaluate(ground)
    colour = "each => getComputedStyle(each).forcedColorAdjust"
    assert lab.open("inspect").locator(".words").evaluate(colour) == "none"


def test_motion_is_left_out_where_it_is_not_wanted(opened: Any) -> None:
    for wanted, moves in (("no-preference", True), ("reduce", False)):
        page = opened(reduced_motion=wanted).open("start")
        running = page.evaluate("document.getAnimations().length")
        assert (running > 0) is moves
