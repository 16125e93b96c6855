"""Opens a server's page in a real browser, on the server's node.

    python browser.py PORT SOCKET PATH TEXT SCREENSHOT [USER PASSWORD]

Like `ssh -L PORT:SOCKET`, it forwards connections from the port to the Unix socket. If SOCKET is
empty, the server itself listens on the port. It prints the page's title, and fails if TEXT does not
appear.
"""

import asyncio
import shutil
import sys

from playwright.async_api import Browser, HttpCredentials, ViewportSize, async_playwright

ARGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
NAMES = ("chromium", "google-chrome", "google-chrome-stable")
PATIENCE = 120_000  # milliseconds


async def hand_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, socket: str) -> None:
    """Connect a client to the socket."""

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
        target.close()

    there, back = await asyncio.open_unix_connection(socket)
    await asyncio.gather(pump(reader, back), pump(there, writer), return_exceptions=True)


async def look(
    browser: Browser, address: str, text: str, screenshot: str, login: HttpCredentials | None
) -> None:
    """Wait until a text is visible on a page, and take a screenshot."""
    viewport: ViewportSize = {"width": 1400, "height": 900}
    page = await browser.new_page(viewport=viewport, http_credentials=login)
    await page.goto(address)
    try:
        await page.get_by_text(text).filter(visible=True).first.wait_for(timeout=PATIENCE)
        await page.wait_for_timeout(1000)  # for the curves next to it
    finally:
        await page.screenshot(path=screenshot)
    print(await page.title())


async def main(
    port: str,
    socket: str,
    path: str,
    text: str,
    screenshot: str,
    user: str = "",
    password: str = "",
) -> None:
    """Open the tunnel and the page."""
    if socket:
        await asyncio.start_server(
            lambda reader, writer: hand_on(reader, writer, socket), "127.0.0.1", int(port)
        )
    login: HttpCredentials | None = {"username": user, "password": password} if user else None
    async with async_playwright() as playwright:
        path_of_it = next(filter(None, map(shutil.which, NAMES)))
        browser = await playwright.chromium.launch(executable_path=path_of_it, args=ARGS)
        await look(browser, f"http://127.0.0.1:{port}{path}", text, screenshot, login)
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
