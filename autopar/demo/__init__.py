"""The model that `autopar demo` trains, and the text that it trains on."""

from autopar.demo.corpus import Corpus as Corpus
from autopar.demo.corpus import batches as batches
from autopar.demo.corpus import load_corpus as load_corpus
from autopar.demo.gpt import CONFIG as CONFIG
from autopar.demo.gpt import QUICK as QUICK
from autopar.demo.gpt import GptConfig as GptConfig
from autopar.demo.gpt import create_state as create_state
from autopar.demo.gpt import eval_loss as eval_loss
from autopar.demo.gpt import example_args as example_args
from autopar.demo.gpt import train_step as train_step
from autopar.demo.run import COMPARED_STEPS as COMPARED_STEPS
from autopar.demo.run import Comparison as Comparison
from autopar.demo.run import Trained as Trained
from autopar.demo.run import compare as compare
from autopar.demo.run import entropy as entropy
from autopar.demo.run import held_out_loss as held_out_loss
from autopar.demo.run import open_devices as open_devices
from autopar.demo.run import train as train
