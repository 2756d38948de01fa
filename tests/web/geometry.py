"""How a page looks, told by the boxes of what it shows.

Light and dark are measured in one task of the browser's, so nothing but the theme can differ between the two: no clock
ticks and no event comes in between. Pictures are compared with no kept ones: fonts, their rasterizer and Chromium's
version move each edge, so a kept picture would say more about the machine than about the page. What a kept picture
would find is asked for directly: that a box moves with the theme, that text is cut off or lies upon other text, that
the page is wider than the screen, and (by axe) that text does not stand out from what is behind it.
"""

from __future__ import annotations

import time

from playwright.sync_api import Page

from tests.web.chromium import BUSY_SECONDS

_BOXES = """() => {
  const shown = it => it.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const boxes = () => [...document.querySelectorAll('body *')].filter(shown).map(it => {
    const { x, y, width, height } = it.getBoundingClientRect();
    const name = it.tagName.toLowerCase() + (it.id && '#' + it.id) + ' ' + (it.textContent ?? '').slice(0, 40);
    return [name, [x, y, width, height].map(Math.round).join(' ')];
  });
  const page = document.documentElement;
  const now = page.dataset.theme;
  page.dataset.theme = 'light';
  const light = boxes();
  page.dataset.theme = 'dark';
  const dark = boxes();
  page.dataset.theme = now;
  return light.flatMap(([name, box], at) =>
    dark[at]?.join() === [name, box].join() ? [] : [`${name}: ${box}, and in the dark ${dark[at]}`]);
}"""


def differences(page: Page) -> list[str]:
    """Elements whose box is another in light than in dark."""
    found: list[str] = page.evaluate(_BOXES)
    return found


# What an ancestor clips is not seen. A table's cell shows an ellipsis where its text is longer, and what scrolls can be
# scrolled to: neither is cut off.
_LAYOUT = """() => {
  const found = [];
  const page = document.documentElement;
  if (page.scrollWidth > page.clientWidth) {
    const wide = [...document.querySelectorAll('body *')].filter(it => {
      const right = it.getBoundingClientRect().right;
      return it.checkVisibility() && right > page.clientWidth + 1 && !scroller(it);
    });
    found.push(`The page is ${page.scrollWidth} px wide, the screen ${page.clientWidth}: ` +
      wide.slice(-3).map(it => it.outerHTML.slice(0, 120)).join(' | '));
  }

  function scroller(it) {
    for (let up = it.parentElement; up !== null && up !== page; up = up.parentElement)
      if (/auto|scroll/.test(getComputedStyle(up).overflowX)) return up;
    return null;
  }

  for (const it of document.querySelectorAll('a, button, input, select, textarea, summary, [tabindex="0"]')) {
    if (!it.checkVisibility({ visibilityProperty: true }) || it.getAttribute('href') === '#content') continue;
    const { left, right, width } = (scroller(it) ?? it).getBoundingClientRect();
    if (left < -1 || right > page.clientWidth + 1 || width === 0)
      found.push(`A control is out of reach: ${it.outerHTML.slice(0, 120)}`);
    const cell = it.tagName === 'BUTTON' ? it.closest('[role="gridcell"]')?.getBoundingClientRect() : undefined;
    if (cell && it.getBoundingClientRect().right > cell.right + 1)
      found.push(`A button is cut off: ${it.outerHTML.slice(0, 120)}`);
  }

  const texts = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const text = walk.currentNode;
    const it = text.parentElement;
    if (text.data.trim() === '' || it.closest('svg, option, .visually-hidden, noscript, a[href="#content"], .uplot'))
      continue;
    if (!it.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    for (const rect of range.getClientRects()) {
      let box = { left: rect.left, right: rect.right, top: rect.top, bottom: rect.bottom };
      for (let up = it; up !== null && up !== page; up = up.parentElement) {
        const style = getComputedStyle(up);
        if (style.overflowX === 'visible' && style.overflowY === 'visible' || style.display === 'inline') continue;
        const edge = up.getBoundingClientRect();
        const isCut = style.overflowX === 'hidden' && (box.right > edge.right + 1 || box.left < edge.left - 1);
        if (isCut && style.textOverflow !== 'ellipsis') found.push(`Text is cut off: ${text.data.trim().slice(0, 80)}`);
        box = { left: Math.max(box.left, edge.left), right: Math.min(box.right, edge.right),
                top: Math.max(box.top, edge.top), bottom: Math.min(box.bottom, edge.bottom) };
      }
      if (box.right - box.left > 2 && box.bottom - box.top > 4) texts.push({ ...box, text, it });
    }
  }
  texts.sort((one, other) => one.top - other.top);
  texts.forEach((one, at) => {
    for (let next = at + 1; next < texts.length && texts[next].top < one.bottom - 4; next += 1) {
      const other = texts[next];
      const isOver = other.left < one.right - 2 && one.left < other.right - 2;
      // What stands above the rest (a table's head, a menu) hides what is under it.
      const [x, y] = [Math.max(one.left, other.left) + 1, other.top + 2];
      const seen = document.elementFromPoint(x, y);
      const isHidden = seen !== null && (!one.it.contains(seen) && !seen.contains(one.it) ||
        !other.it.contains(seen) && !seen.contains(other.it));
      if (isOver && !isHidden && one.text !== other.text)
        found.push(`Text lies upon text: “${one.text.data.slice(0, 60)}” and “${other.text.data.slice(0, 60)}”`);
    }
  });
  return found;
}"""


def faults_of_layout(page: Page) -> list[str]:
    """A page that is wider than the screen, controls out of reach, and text that is cut off or lies upon other text. Of
    the page at rest: what the page measures itself, it draws anew some frames after the screen has another size."""
    deadline = time.monotonic() + BUSY_SECONDS
    found: list[str]
    while (found := page.evaluate(_LAYOUT)) and time.monotonic() < deadline:
        page.wait_for_timeout(200)
    return found
