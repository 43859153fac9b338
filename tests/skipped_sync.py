"""train.py, but the engine is not given the weights of the second update: to be detected."""

import rollout
import train

load_weights = rollout.Engine.load_weights


def forgetful(engine: rollout.Engine, weights, version: str) -> None:
    if version != "2":
        load_weights(engine, weights, version)


if __name__ == "__main__":
    rollout.Engine.load_weights = forgetful
    try:
        train.main()
    except train.Refused as error:
        print(f"refused: {error}")
