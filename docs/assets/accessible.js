// What the scripts of the theme make: a wide table scrolls by keyboard too, and the buttons of a block
// of code are not part of the navigation.
function mend() {
  for (const frame of document.querySelectorAll(".md-typeset__scrollwrap")) {
    frame.tabIndex = frame.scrollWidth > frame.clientWidth ? 0 : -1;
  }
  for (const buttons of document.querySelectorAll(".md-code__nav")) buttons.role = "none";
}
new ResizeObserver(mend).observe(document.body);
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
