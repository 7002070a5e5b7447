"""Prints in the ways that make trouble, as the first argument says."""

import os
import sys
import time
from pathlib import Path

RANK = os.environ["RANK"]


def lines(count):
    for number in range(int(count)):
        print(f"rank {RANK} line {number}")
        if number % 10 == 0:
            print(f"rank {RANK} error {number}", file=sys.stderr)
    os._exit(0)  # nobody is left to flush anything


def parts(path):
    os.write(1, b"Continue? ")
    wait_for(path)
    os.write(1, b"yes\n")
    for percent in range(0, 101, 10):
        os.write(1, f"\r{percent:3} %".encode())
    os._exit(0)


def binary():
    os.write(1, bytes(range(256)) * 100)
    os.write(2, b"\xff\xfe no text \0 \n")


def bulk(megabytes, path):
    for number in range(int(megabytes) * 1024):
        os.write(1, f"{number:1023}\n".encode())
    wait_for(path)


def many(count, path):
    wait_for(path)
    lines(count)


def wait_for(path):
    while not Path(path).exists():
        time.sleep(0.01)


{"lines": lines, "parts": parts, "binary": binary, "bulk": bulk, "many": many}[sys.argv[1]](
    *sys.argv[2:]
)
