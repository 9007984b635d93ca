"""RMT, and the source images that it replays."""

from ctta.methods.rmt.method import RMT as RMT
