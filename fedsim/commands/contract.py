"""The properties that every method must have, checked on a small federation: `fedsim check-method mymethods:moon`.

The federation has four rotations of real digits of 16 pixels, the small CNN with batch norm, and three
rounds. All properties are checked on five runs. One is whole, one is killed and finished in another process, one has
its first round in a process for each client, and one has failures and malformed replies. From the last one, which is
FedAvg's, the method must differ.
"""
