"""CPU state: process trees through CRIU, and CRIU's images as streams of a repository."""
