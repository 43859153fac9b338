"""What counts as correct, what is refused, and what hostile model output costs."""

import os
import random
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ROOT

from answer_checking import judge
from answer_checking.extraction import last_box
from reward import compute_rewards, score
from support.command import Stopped
from support.tasks import Dataset

# Answers by their gold: right ones as gold == answer == another answer, and wrong ones
# as gold != answer. A ↵ is a line break.
MATH = r"""
18 == 18.0 == $18$ == 18. == \$18
035 == 35
18\% == 18
90^\circ == 90
1234 == 1,234 == 1{,}234 == 1\,234
10,\!000 == 10000
-.5 == -0.5
0.00005 == 5e-5 == 5 \times 10^{-5}
2^{100} == 1267650600228229401496703205376
\frac{1}{2} == 0.5
\frac12 == 1/2
\frac1{2} == \dfrac{2}{4}
2\frac{3}{4} == 2.75
-2\frac34 == -\frac{11}{4}
2\sqrt{3} == \sqrt{12}
\frac{\sqrt2}{2} == \frac{1}{\sqrt{2}}
720 == 6!
3 == \log_2 8
3:4 == \frac{3}{4}
x^2+2x+1 == (x+1)^2
3+4i == 4 i+3
\frac{3+4i}{5} == \frac35+\frac45 i
10 == 2\cdot\boxed{5}
18 == x=18
y=2x+1 == y-2x=1
x<3 == 3>x
5, 6 == 6 \text{ or } 5
\pm2 == 2,-2
(1,2) == \left(1, 2\right)
(-\infty,2)\cup(3,\infty) == (3, \infty) \cup (-\infty, 2)
\begin{pmatrix}1\\2\end{pmatrix} == \begin{bmatrix}1\\2\end{bmatrix}
18 == 18 dollars == 18\text{ dollars}.
5\text{ cm}^2 == 5
12\pi\mbox{ cm} == 12\pi
\frac{1}{2}\mathrm{~kg} == 0.5
204_5 == 204_{5}
12_3, 21_3 == 21_3, 12_3
A == \text{A}
\text{(C)} == C
\text{(E)} == \textbf{(E)}\ 5
C == C. x = 42
odd == \text{Odd.}
No == \text{no}
64 == 64 square feet
\frac{1}{2004!} == \frac{2005}{2005!}
\frac{2^{2009}-1}{2^{2009}} == 1-2^{-2009}
3e8 == 3 \times 10^8
4.5e33 == 4.5 \times 10^{33}\text{ m/s}
6e23 == 6×10²³
-5 == −5 == {-}5
120 == 120°
2\sqrt{53} == 2√53
12\pi == 12π cm
x^{-3} == x⁻³
3.5 == 3½
18 == １８
\frac{\pi}{2} == pi/2
(-\infty,2)\cup(3,\infty) == (−∞,2) ∪ (3,+∞)
1234 == 1 234
18 == \textcolor{red}{18} == \(\text{18}\) == {\bf 18} == **18**,
18 == +18 == The answer is 18 == USD 18 == 18 percent
\Big[\frac{5}{12},\frac{2}{3}\Big] == [\tfrac{5}{12},\tfrac23]
\frac{\pi}{4} == \frac\pi4
\frac{1+a}{c} == \frac{1+a}c
\frac12 == \frac 1 2 == {1 \over 2}
6 == \binom 4 2 == {4 \choose 2} == _4C_2 == {}^4C_2
\sqrt[3]{2} == \sqrt[3]2
\sqrt{x} == x^\frac12
2\times10^{-10} == 2*10^(-10)
6 == 2(3) == \left(2\right)\left(3\right)
40 == 2^{3}5
-3./2 == -1.5
\arcsin(1/2) == np.arcsin(1./2)
1.5 == 1+\log_4(2)
\log_2(3) == \frac{\ln 3}{\ln 2}
2\pi == \pi(2)
f_1(2) == f_{1}(2)
\sin 10^\circ == \cos 80^\circ
\frac16 == 0.1\overline{6}
E_1+e_1 == e_{1}+E_{1}
I_{\max} == I_\text{max}
L_{\odot} == L_\odot
2\hbar v == v\hbar\cdot2
v^2_0 == v_0^2
1-\frac{1}{e} == 1-\frac{1}{\mathrm{e}}
\frac12-\frac{\sqrt3}{2}i == e^{-i\pi/3}
5 == f^{-1}(3) = 5
3 == x = 1+2 = 3
12 == 12^{\mathrm{th}}\text{ grade}
15 == 15 \, \text{cm}^2 == 15\ \text{km}/\text{h} == 15\textnormal{ m/s}^{2}
15 == 15 (apples) == 15cm
25 == 25^{\circ}\mathrm{C}
5:30\text{ p.m.} == 5{:}30 p.m.
x \in [-2,7] == -2 \le x \le 7
x>2 == \{x \mid x>2\}
x\in(0,\frac12) == x\in(0,0.5)
(-\infty,-1)\cup(3,\infty) == x<-1 \text{ or } x>3
x \ne 0 == \mathbb{R}\setminus\{0\}
\text{all real numbers} == (-\infty,\infty)
\emptyset == \varnothing == \text{empty set}
x^2+y^2=25 == 2x^2+2y^2-50=0
a<b<c == c>b>a
f(x)=x == f(x)=x \text{ for all } x
1,1,2 == 1,2,1
x = \pm 1 == -1, 1
x=\frac{1\pm\sqrt5}{2} == x=\frac{1-\sqrt5}{2}, x=\frac{1+\sqrt5}{2}
\frac{1\pm\sqrt5}{2} == \frac{1+\sqrt5}{2},\frac{1-\sqrt5}{2}
(x,y)=(3,2) == (3,2)
x=1,2 == x_1=1, x_2=2
1234 == k = 1,234
(x,y)=(1,2) == (x,y) = (1.0,2)
1,2,\ldots,n == 1, 2, ..., n
\begin{pmatrix}1\\2\end{pmatrix} == \begin{pmatrix}1\\[4pt]2\end{pmatrix}
1234567890 == 1,{}234\text{,}567{,}\! 890
1,2,3,4 == \textbf{1},\mathbf{2},\mathsf{3},\mathtt{4}
1,2,3,4,5 == \texttt{1},\emph{2},\bm{3},\boldsymbol{4},\underline{5}
1,2,3,4 == 1\textit{ cm},2\textrm{ cm},3\textup{ cm},4\mathit{cm}
1,2,3 == 1\operatorname{cm},2{\rm cm},3\rm{cm}
1,2,3,4,5,6 == \displaystyle1,\large2,\huge{3},\small4,\bf5,\fbox{6} \checkmark ✓
1,2,3,4,5,6 == \[1\],\euro2,3\cent,\mathdollar4,5£,\pounds6
1,2,3 == 1\quad\text{cm},2\thinspace\text{cm},3\enspace\text{cm}
1,2 == \text{ }1\text{ }\text{cm}\text{, }\text{2 cm}\text{}
1,2,3,4 == 1st,2nd,3^{rd},4th
1,2 == 1\text{ percent},2 pct
1,2,3,4 == 1\text{, and }2 and 3 \& 4
18 == => "18"
5 == \text{Answer: }5
5 == Therefore, x = 5
18 == \text{Rs. }18
f(x)=x == f(x)=x \forall x
k\pi == k\pi, k \in \mathbb{Z}
1,2,3,4 == 1^{\circ},2^\degree,3\degree,4^{\degree}
1,2,3 == 1°C,2\text{°F},3°\text{C}
\tan10° == \cot80°
\sec10° == \csc80°
15,5 == 15\text{ m}/\text{sec},5\text{ N}\cdot\text{m}
1,2,3,4 == 1min,2\,\text{min},3\text{sec}^2,4 sec
1,2,3,4,5,6,7 == 1kg,2ml,3ft,4in,5lbs,6oz,7hr
1,2,3,4,5 == 1kW,2USD,3cm^2,4cm^{2},5mph
1,2,3,4 == 1kJ,2 Hz,3 kHz,4kPa
5 kN,6 == 5,6 N/m == 5 Pa,6
5 N,18,24,2 == 5\text{ N},18\,m,24 m^2,2 MPa == 5,18,24,2
\pi r^2 h == V = \pi r^2\,h
x=1,y=2 == $\begin{cases} x = 1, \\ y = 2 \end{cases}.$
5,6 == 5或6 == x=5 或 x=6
\frac{1}{2}x == 1/2 x
\pm1\pm2i == \pm 1 \pm 2i
x^2+2^n == x**2+2**n
\sqrt{2}+2^N+x^{-y} == 2**0.5+2**N+x**-y
(x+1)^2 == (x+1) ** 2
x^{-2} == x**-2 == x**(-2)
8 == 2**3 == **8** == **8**apples == **8**(apples)
red, blue == \text{red}, \text{blue}
\text{red, blue} == \text{red and blue} == \text{Red, blue}
\text{IV antibiotics} == IV antibiotics
0.3 == P = 1 - P(A\cup B) = 0.3 == P = P(A\mid B) = 0.3
5 == v = λf = 5
A, C == \text{A and C} == \text{C, A only}
I and III == \text{I and III only} == I and III only
II == \text{II only}
2\pi == 2\text{ pi}
\frac{1}{\pi} == \frac{1}\pi
\sqrt{\pi}+\sqrt{\frac12}+\sqrt{x}+\sqrt{3} == \sqrt\pi+\sqrt\frac12+√x+\sqrt(3)
x>2 == \{x : x>2\}
x>2 == \{x | x>2\}
\{1,2\} == x \in \{1,2\}
(1,2) == (a,b)=(1,2)
A^T == A^{T}
A^T == A^\top
A^T == A^{\top}
\frac13,\frac{4}{33},\frac{41}{333} == 0.\overline{3},0.\overline{12},0.\overline{123}
\frac17 == 0.\overline{142857}
x \ne 3 == x \not= 3
\epsilon == \varepsilon
2000 == 2 x 10^3
3.5 == \nicefrac{7}{2}
\binom{n}{2} == \tbinom n2
\frac{a}{b+1} == {a \over b+1}
2f'(x)=y == y=f'(x)+f'(x)
15 == {15\text{ cm}^2}
9.8,15 == 9.8\,\mathrm{m/s^2},15\text{ cm²}
4,5 == 4\frac{\text{m}}{\text{s}},5\,\dfrac{\mathrm{m}}{\mathrm{s}^2}
1,2,3,4 == 1 km/h,2 m/s^2,3 sq ft,4 per day
x^2+x == \mathbf{x^2}+\mathrm{x}
x^2y == \mathbf{x^2y}
\frac12 == \mathbf{\frac{1}{2}}
18 == \text{\textbf{18}}
0.001+e^{-x} == 10^-3+e^-x
-\sqrt[3]{2} == \sqrt[3]{-2}
\frac13,\frac43,\frac{122}{990} == 0.\bar{3},1.\overline3,0.1\overline{23}
100,0 == 0,100
1000\pi == 1,000\pi
12345 == 12\;345
\frac12,18,19 == 1⁄2,“18”,19％
2\sin x == 2sinx
B == (B) 5
B == B) 5
B == \text{B. Paris}
\text{I only} == \text{I only.}
x\ne3 == \mathbb{R}-\{3\}
x>2 == \{x\in\mathbb{R} \mid x>2\}
\mathbb{R} == \text{all reals}
y''+y'=0 == y^{\prime\prime}+y^\prime=0
18 == \angle A = 18^\circ
18 == m\angle ABC = 18^\circ
18 == m+n = 18
18 == |z| = 18
\frac12 == \sin\theta = \frac12
k\pi == x = k\pi \quad (k \in \mathbb{Z})
5:30\text{ p.m.} == 5:30 PM
9\text{ a.m.} == 9\text{ A.M.}
8\pi == \frac{dV}{dt}=8\pi
f_x == \frac{\partial f}{\partial x}
(3,200) == (3,\,200)
-5,-6 == ‑5,‐6
12345 == 12 345
5 == \text{Total cost: }\$5
\frac15,\frac25,\frac35,\frac45,\frac16 == ⅕,⅖,⅗,⅘,⅙
\frac56,\frac18,\frac38,\frac58,\frac78 == ⅚,⅛,⅜,⅝,⅞
x_0+x_1+x_2+x_3+x_4 == x₀+x₁+x₂+x₃+x₄
x_5+x_6+x_7+x_8+x_9 == x₅+x₆+x₇+x₈+x₉
1\le x\le3 == 3⩾x⩾1
1\le x\le3 == 1⩽x⩽3
2.75 == x = 2 3/4
5,6,7 == 5\text{ decks},6\text{ in May},7\text{ after taxes}
-2,3 == x=-2\text{ OR }x=3
2^n == a_n = 2^n \text{ for all } n \geq 1
10:45\text{ a.m.} == 10:45 am
55 == S₁₀ = 55
50 == \text{Area}=2\cdot25\text{ cm}^2=50\text{ cm}^2
\frac{7}{12} == 0.58\overline{3}
-\frac{7}{3},\frac{101}{3} == -2.\dot{3},33.(6)
\frac17,\frac16 == 0.\dot{1}4285\dot{7},0.1\dot{6}
(2,5) == x=2,\ y=5
(2,5,7) == y=5, z=7, x=2
\log_{10}5 == \lg 5
\tan x+\cot x == \tg x + \operatorname{ctg} x
\arctan 2 == \arctg 2
(1,3) == ]1,3[
(-\infty,1]\cup[2,\infty) == ]-\infty,1]\cup[2,\infty[
C == \text{Answer: C}
C == The answer is C
C == Option C
B == B)
x^{2/3} == \sqrt[3]{x^2}
15,48 == 5!!,6!!
20,20 == {}_5P_2,P(5,2)
10 == C_5^2
10 == C^2_5
3-4i == \overline{3+4i}
2+i == \overline{2-i}
(3,-1,2) == \langle 3,-1,2\rangle
(3,-1,2) == ⟨3,-1,2⟩ == <3,-1,2>
5:3 == 5∶3 == 5：3
\{1,2\} == ｛1、2｝
[1,\sqrt[4]{2}] == ［1，∜2］
3.14 == ≈3.14 == \approx 3.14
6\lfloor x\rfloor == 2∙3⌊x⌋
(3,-1,2) == 3\mathbf{i}-\mathbf{j}+2\hat{k}
(3,-1) == 3\mathbf{i}-\mathbf{j} == 3\hat{\imath}-1\hat{\jmath}
204_5 == 204_{(5)} == (204)_5
2F_{16} == 2f_{16}
4\pmod 7 == 4 \mod 7
4\pmod 7 == x \equiv 4\ (\text{mod }7)
\text{ellipse} == \text{an ellipse}
\text{March }14 == 14\text{ March}
\text{May }1,2024 == 1 May 2024
\text{September }9 == 9 September
2024-05-01 == \text{2024-05-01}
10–15 == 10--15
1.5-2.5 == 1.5--2.5
10\%-15\% == 10-15
7 == 10 - 3
2 == 1\thinspace + 1
20 == A_5^2 == P_5^2 == A^2_5 == P^{2}_{5}
x^{3/4} == \sqrt[4]{x^3}
x^{3/2} == \sqrt{x^3} == x\sqrt{x}
(x+1)^{5/6} == \sqrt[6]{(x+1)^5}
\begin{pmatrix}3\\-1\\2\end{pmatrix} == \langle 3,-1,2\rangle == (3,-1,2)
12:30 == \text{12:30}
\text{no solution} == \emptyset == There is no solution.
\text{no real solutions} == No real solution.
\text{does not exist} == DNE == The limit does not exist.
12 != 1 \quad 2 != 1\,\,2
18 != x+1=18 != x-y=18 != 2x+y=18 != xy=18 != x^2=18 != e^x=18 != 2\sin x=18
18 != -18 != 0.18
5 != .5
100000000 != 100000001
\frac{1}{2} != \frac{2}{1}
\frac{1}{3} != 0.333333
.0000672 != 6.71 \times 10^{-5}
\infty != -\infty
x^2+1 != y^2+1
R^2-r^2 != 0
3+4i != 3-4i
x<3 != x>3
5 != 5, 6 != 5 \text{ or } 6
\pm2 != 2
(1,2) != [1,2]
(1,2,3) != (3,2,1)
\begin{pmatrix}1\\2\end{pmatrix} != \begin{pmatrix}2\\1\end{pmatrix}
18 != 18 xy
2 != 2\mathrm{e}^{3}
18 != 18 million
5 != 5\text{ factorial}
20\%\text{ increase} != 20\%\text{ decrease}
5:30\text{ a.m.} != 5:30\text{ p.m.}
6\text{ red}, 5\text{ blue} != 6\text{ red}, 9\text{ blue}
3 != 1 2
12 != 1\,2
1.25 != 2 3/4
5 != 2(3) != \left(2\right)\left(3\right)
\frac{11}{4} != 2\left(\frac34\right)
204 != 204_5 != 204_{(5)}
204_5 != 204 != 204_6
A != B
\text{Sunday} != \text{Monday}
\frac{1}{2004!} != \frac{7}{2004!}
\frac{2^{2009}-1}{2^{2009}} != \frac{5}{2^{2010}}
e^{-500} != e^{-501}
\pi+10^{-300} != \pi
\ln(1+10^{-200}) != 0
3e8 != 8 \cdot 3e
3 != 1{2} != 3 \pmod 5 != x \equiv 3
8 != 2^35
5 != (2)3 != 2[3] != {2}(3) != 2\frac{6}{2} != [5]
0.3 != 0.3...
1,2 != 1,2,\ldots
60 != 60^\circ 42'
\sin 10 != \sin 10^\circ
h != \hbar
360 != 0^\circ \text{ and } 360^\circ
32349 != 32, 349
2:3:4 != \frac16
1,1,2 != 1,2,2
-2,-2 != -2
1,3 != (1,3)
\{1,3\} != [1,3]
18 != x^2=18 != xy=18 != 17=18
x=3 != x=1 \implies y=3 != x=1 \Rightarrow y=3 != x=1 \to y=3
x=3 != x \equiv 1 = 3 != x=1 \ne y=3
x=18 != y=18
(1,2) != (y,x)=(1,2)
y=2x+1 != 1
x^2+y^2+1=0 != x^2+y^2+2=0
-2\le x\le7 != (-2,7)
x+y<3 != -x-y<-3
18 != 18\text{ millions} != 18\text{ twelfths}
18 != 18\text{ million}\text{ dollars} != 18\text{ but not really}
18 != 18\text{ times two} != 18\text{ k} != 18 or nineteen
18 != \text{is at least }18
A != \textbf{(A)}\text{ or }\textbf{(B)}
5 != 5+\sin(10^{3000})
18 != ? != \frac{18
f'(x) != f(x)
A'' != A'
I_1 != I_2
I_{\max} != I_{\min}
I^2R != -R
x != x^T
ABC != CAB
\angle ABC != \angle ACB
\text{no solution} != \text{no integer solution} != \text{one solution} != 0
|x| != x
500 != 10^{3}.5
123 != 0,123
1,0 != 1,000\pi
2abcd != 2abce
x>1\text{ or }x<3 != x>1\text{ and }x<3
x=y=1 != 1
x=y=6 != x=2y=6
P(X=2)=\frac12 != P(X=3)=\frac12
\begin{cases}x=1\\y=2\end{cases} != \begin{cases}x=3\\y=2\end{cases}
x=1\quad y=2 != x=3\quad y=2
k\pi,k\in\mathbb{Z} != k\pi,k\in\mathbb{N}
k\pi != k\pi \quad (k \in \mathbb{N})
f(x)=x\text{ for all }x>0 != f(x)=x\text{ for all }x<0
n\text{ is prime} != n\text{ is composite}
2\text{ (max)} != 2\text{ (min)}
5N != 5 N
2N/m != 2
3Pa != 3
\{n,2 m,k\} != \{n,2,k\}
\text{True, False, True} != \text{True, True, False}
\text{T, F, T} != \text{F, T, T}
\text{yes, no} != \text{no, yes}
6 != x=5 且 x=6 != x_1=5 \cup x_2=6 != \theta=5|\theta=6
\pi r^2 h != \pi r^2 != \pi r^2 g
m_1 g != m_1
-1 != 1-2 m
\log_2 N != \log_2 A
6 != x=5 \lor x=6 != x=5\vee x=6 != x=5 或 x=6 != x=5|x=6
2 != 2**N
2x != x**2
2x+2 != (x+1)**2 != 2**(x+1)
I != I and III only
A != \text{A or B}
IV antibiotics != IV fluids
p\lor q != p\text{ and }q
\text{increasing, decreasing} != \text{decreasing, increasing}
5\text{ m upwards} != 5\text{ m downwards}
5\text{ bn} != 5\text{ mn}
5 != 5\text{ per mille}
5\text{ BC} != 5\text{ AD}
5 != 5\text{ Thousand}
20\%\text{ Increase} != 20\%\text{ Decrease}
5\text{ PM} != 5\text{ AM}
12:00\text{ noon} != 12:00\text{ midnight}
15\text{ April} != 15\text{ March}
5\text{ m forward} != 5\text{ m backward}
20 != \text{Decrease: }20
5 != \text{At least: }5
3 != x=-2\text{ OR }x=3
3 != x=-2\text{ or maybe }x=3
2\text{ hours }30\text{ minutes} != 3\text{ hours }20\text{ minutes}
2 hours and 30 minutes != 5 hours and 12 minutes
2h 30min != 3h 20min
4R3 != 3R4
3\text{ to }2 != 2\text{ to }3
9:00 != 10:00
3:45\text{ p.m.} != 1:15\text{ p.m.}
3200 != (3,\,200)
25 != 5 10/2
\frac{dy}{dx}=y != y=0
\frac{dy}{dx}=2x != \frac{dx}{dt}=2x
f(x)=x\text{ for all }x\ge0 != f(x)=x\text{ for all }x\le0
f(n)=n\text{ for all odd }n != f(n)=n\text{ for all even }n
k\pi,k\in\mathbb{Z}\setminus\{0\} != k\pi,k\in\mathbb{Z}
5 != 10^{950}(\sqrt2+\sqrt3-\sqrt{5+2\sqrt6})
2024-05-01 != 2018
2024-05-01 != 2024-04-02
05/01/2024 != 5/2024
05/2024 != \frac{5}{2024}
1/2/3 != \frac16
555-1234 != -679
(555) 123-4567 != 63698
978-3-16-148410-0 != -147451
10-15 != -5
10--15 != 25
1.5-2.5 != -1
10\%-15\% != -5
-5--3 != -2
\$10-\$15 != -5
1-3,5-7 != 2-4,6-8
1.2.3 != 0.24
10:05 != 2
1:30:00 != 3:60:00
\text{May }1,2024 != \text{May }2,2024
123 != 1,23
1.23 != 1,23
1,234 != 1.234
(2,5) != x=5,y=2
(2,5) != x=2,x=5
(2,5) != x+1=2,y+1=5
2,5 != 2,y=6
120! != 5!!
5 != \lg 5
\ln 5 != \lg 5
C_1^2 != 0
x != \sqrt{x^2}
3+4i != \overline{3+4i}
[1,3] != ]1,3[
[1,3) != ]1,3]
(3,1,2) != 3\mathbf{i}-\mathbf{j}+2\mathbf{k}
4\pmod 7 != 4
4\pmod 7 != 4\pmod 9
B != \text{Answer: C}
A != \text{The answer is not A}
0.583 != 0.58\overline{3}
\frac12 != 0.(5)
12 != 1\thinspace2
3 != {1}{2}
12:30 != \frac{12}{30} != \frac25 != 12:03
1 != A_1^2 != P_1^2
20 != A_2^5 != A_5
x^{1/2} != \sqrt[4]{x^2}
x^{3/4} != \sqrt[3]{x^4}
\begin{pmatrix}3\\-1\\2\end{pmatrix} != (3,2,-1) != \begin{pmatrix}3&-1&2\end{pmatrix}
18 != 18↵million
"""
GSM8K = r"""
84 == \boxed{84.0} == \boxed{\$84} == \boxed{84\%} == \boxed{84\text{ lemons}}
84 == #### 84 lemons. == \boxed{x_A=84} == #### ８４ == #### Total cost: $84
3600 == #### 3,600 == \boxed{1,500 + 2,100 = 3,600} == #### 60 \times 60 = 3600 = 3,600
10000000000 == #### 1e10
3,600 == \boxed{3{,}600}
1800 == #### $1,800.00
-3 == #### -3
0.1 == #### .1
18 == #### 9 * 2 = <<9*2=18>>18 == \boxed{20 - 2 = 18}
18 == #### x = 9 \times 2 = 18 == \boxed{\frac{36}{2} = \$18}
18 == \boxed{\{18\}} == #### **$18.00** == #### (18) miles per hour, == #### +18
84 != #### 84.00000000001 != \boxed{168/2} != #### 84+1 != #### >= 84 != #### 8(4)
84 != #### 苹果/2 = 84 != #### ? + 1 = 84 != #### 2\theta = 84 != #### 2θ = 84
84 != \boxed{\square + 16 = 84} != #### \ge 80 = 84
84 != #### 2x = 84 != \boxed{\frac{x}{2} = 84} != #### X + 1 = 84 != #### A = 5; B = 84
84 != #### Case 1: x = 84 != \boxed{x=2\text{ or maybe }x=84} != #### x=2, x=84
3600 != #### 3,6,00
9007199254740993 != #### 9007199254740992
18 != #### 18 million != #### 18 Dozen != #### 18x
2 != #### 2 and a half != #### 2 thirds
1 != #### 1. The first case
"""
EXACT = """
1283 == 8+5+0=13. 7+0+1=8. 4+8+0=12. 1283 == 1283↵ == <think>1284</think> 1283
1283 == 1283<|im_end|>↵
1283 == 1283<|im_end|>↵<|im_start|>user↵3+3<|im_end|>↵<|im_start|>assistant↵6
1283 != 1283 8+5 != 01283 != 1283. != ↵ != <think>1283</think>
"""

# Where the answer 5 is, for math and gsm8k alike.
RIGHT_RESPONSES = r"""
So it is $\boxed{5}$.
So it is \fbox{5}.
First \boxed{3}, no: \boxed{5}.
So it is \boxed{5}. Check: \boxed{
x &= 5 \\\boxed{5}
\{ so \boxed{5}
<think>\boxed{3}</think> \boxed{5}
<think>#### 3</think> #### 5
So it is \boxed{5 \\}
<answer>#### 5<|im_end|></answer>
\boxed{5<pad>}</s><｜end▁of▁sentence｜>
2+3=5↵#### 5↵
\boxed{5} <|response|>
#### 5 <|final|>
\boxed{5}<|im_start|>answer
\boxed{3} <|response|>\boxed{5}
Here are my reasoning steps:↵1. 2+3 is \boxed{5}
So here's my thought process: 2+3 is \boxed{5}
tan x<cot x, so y>3 and \boxed{5}
Here are my reasoning steps:↵1. \boxed{3}↵[BEGIN FINAL RESPONSE]↵\boxed{5}
#### 3↵No:↵#### 5↵That is all.
"""
# Turns that the model has invented after its own are not graded.
RIGHT_RESPONSES += r"""
\boxed{5}<|im_end|>↵<|im_start|>user↵3+3?<|im_end|>↵<|im_start|>assistant↵\boxed{6}
\boxed{5}<|eot_id|><|start_header_id|>assistant<|end_header_id|>↵↵\boxed{6}
\boxed{5}<end_of_turn>↵<start_of_turn>user↵\boxed{6}
\boxed{5}</s>[INST] 3+3? [/INST] \boxed{6}
<|channel|>analysis<|message|>\boxed{6}<|end|><|start|>assistant<|channel|>final<|message|>\boxed{5}<|return|>
#### 5<turn|>
#### 5<|turn>user↵#### 6
#### 5[|endofturn|]↵[|user|]3+3?↵[|assistant|]#### 6
\boxed{5}<|role_end|><role>HUMAN</role>3+3?<|role_end|> \boxed{6}
\boxed{5}<|plamo:eos|><|USER_TOKEN|> \boxed{6}
\boxed{5}<end_of_utterance> \boxed{6}
\boxed{5}<|im_user|>user 3+3? \boxed{6}
\boxed{5}↵<SPECIAL_11>User↵3+3? \boxed{6}
"""
WRONG_RESPONSES = r"""
5
\boxed{}
The answer is $5$.
First \boxed{5}, no: \boxed{3}.
So it is \boxed{5
#### 5, that is \boxed{3}
#### 5↵#### 3
#### 5 or 6
<think>\boxed{5}</think> So it is 5.
\boxed{5}</think> So it is 5.
\boxed{5}</think>
<|reasoning|>\boxed{5} <|response|>
\boxed{5} <|response|> I do not know.
\boxed{5}↵[BEGIN FINAL RESPONSE]↵I do not know.
</think><think>It may be \boxed{5}
"""


def lines_of(table: str) -> list[str]:
    """Return the lines of a table, in which a ↵ is a line break."""
    return [line.replace("↵", "\n") for line in table.split("\n") if line]


def verdicts_of(table: str) -> list[tuple[str, str, float]]:
    """Return (gold, answer, reward) for each answer in a table such as MATH."""
    verdicts = []
    for line in lines_of(table):
        sign = " == " if " == " in line else " != "
        gold, *answers = line.split(sign)
        verdicts += [(gold, answer, float(sign == " == ")) for answer in answers]
    return verdicts


def boxed(answer: str) -> str:
    return f"So it is \\boxed{{{answer}}}."


@pytest.fixture(scope="module")
def rewards() -> dict[tuple[str, str], float]:
    """All of MATH in one batch."""
    golds, answers, _ = zip(*verdicts_of(MATH), strict=True)
    scored = score([boxed(answer) for answer in answers], golds)
    return dict(zip(zip(golds, answers, strict=True), scored, strict=True))


@pytest.mark.parametrize("gold, answer, expected", verdicts_of(MATH))
def test_math_verdict(gold, answer, expected, rewards):
    assert rewards[gold, answer] == expected


@pytest.mark.parametrize("verifier, table", [("gsm8k", GSM8K), ("exact", EXACT)])
def test_a_verdict_on_a_number_or_a_word(verifier, table):
    golds, responses, expected = zip(*verdicts_of(table), strict=True)
    assert score(responses, golds, verifier) == list(expected)


@pytest.mark.parametrize("verifier", ["gsm8k", "math"])
def test_the_answer_is_the_last_complete_box_or_else_behind_the_last_mark(verifier):
    hidden = ["\\boxed{5\u200b}", "\\boxed{\x1b[1m5\x1b[0m}"]
    right = [*lines_of(RIGHT_RESPONSES), *hidden, "x" * 300_000 + "\\boxed{5}"]
    responses = [*right, *lines_of(WRONG_RESPONSES), "", "\\boxed{" + "0" * 300 + "5}"]
    golds = ["5"] * len(responses)
    scored = zip(responses, score(responses, golds, verifier), strict=True)
    assert [response for response, reward in scored if reward] == right


# What begins a thought, and what ends it.
THOUGHTS = """
<think> ... </think>
<think > ... </think >
<think level="extended"> ... </think>
<extended_thinking> ... </extended_thinking>
<Thought> ... </Thought><Output>
<analysis> ... </analysis>
<scratchpad> ... </scratchpad>
<reasoning> ... </reasoning>
<reflection> ... </reflection>
<inner_monologue> ... </inner_monologue>
<chain-of-thought> ... </chain-of-thought>
<cot> ... </cot>
<seed:think> ... </seed:think>
<ifm|think_fast> ... </ifm|think_fast>
<think_start> ... <think_end>
<thought_start> ... <thought_stop>
<start_working_out> ... <end_working_out>
<|thinking_start|> ... <|thinking_done|>
<inner_voice> ... </inner_voice>
<contemplation> ... </contemplation>
<思考> ... </思考>
<|reasoning|> ... <|response|>
<|begin_of_thought|> ... <|end_of_thought|><|begin_of_solution|>
<|START_THINKING|> ... <|END_THINKING|><|START_RESPONSE|>
<｜thinking｜> ... <｜/thinking｜>
<|thinking|> ... <|answer|>
[THINK] ... [/THINK]
◁think▷ ... ◁/think▷
<unused94>thought↵ ... <unused95>
<|inner_prefix|> ... <|inner_suffix|>
<|channel>thought↵ ... <channel|>
<|channel|>analysis<|message|> ... <|end|><|start|>assistant<|channel|>final<|message|>
<|channel|>commentary to=f<|message|> ... <|channel|>final <|constrain|>text<|message|>
<|think|> ... <|end|><|begin|>assistant<|content|>
<|content_thinking|> ... <|end_message|><|message_model|><|content_text|>
<|im_start|>think↵ ... <|im_start|>answer↵
<|open|>think<|sep|> ... <|close|>think<|sep|><|open|>response<|sep|>
to=self<|message|> ... <|eom|>to=user<|message|>
Here is my thought process:↵ ... ↵Here is my response:↵
Here's my thought process:↵ ... ↵Here's my response:↵
"""


@pytest.mark.parametrize("tags", lines_of(THOUGHTS))
def test_nothing_in_a_thought_is_an_answer(tags):
    begin, end = tags.split(" ... ")
    responses = [
        rf"{begin}Is it \boxed{{3}}?{end}It is \boxed{{5}}.<|end|>",
        rf"{begin}Is it \boxed{{5}}? But",
        rf"{begin}It is \boxed{{5}}.{end}I do not know.",
    ]
    assert score(responses, ["5"] * 3) == [1.0, 0.0, 0.0]
    assert score([f"{begin}3{end}5", f"{begin}5"], ["5", "5"], "exact") == [1.0, 0.0]


@pytest.mark.parametrize(
    "text",
    [
        "a<b, which I think, and c>d",
        "<https://think.com>",
        "<plane>",
        "x<y",
        "<inner product>",
        "<inner_product>",
        "<working>",
    ],
)
def test_what_only_resembles_a_tag_of_a_thought_hides_no_answer(text):
    assert score([rf"{text} \boxed{{5}}"], ["5"]) == [1.0]


def test_last_box_is_the_last_box_to_close():
    assert last_box(r"a \boxed{1} b \boxed{\{2\}} c") == r"\{2\}"
    assert last_box(r"a \boxed{1} b \boxed{2") == "1"
    assert last_box("} } {") == ""


@pytest.mark.parametrize("verifier", ["exact", "gsm8k", "math"])
def test_an_empty_batch_has_no_rewards_and_unequal_lengths_are_an_error(verifier):
    assert score([], [], verifier) == []
    with pytest.raises(ValueError, match="zip"):
        score(["1"], [], verifier)


# --- hostile output

TOWER = r"\boxed{98^{97^{96}}}"
# Answers to gold 5 that are wrong, and what their comparison does.
HOSTILE_RESPONSES = [
    TOWER,
    "\\boxed{" + r"\sqrt{2+" * 40 + "2" + "}" * 40 + "}",
    r"\boxed{\begin{pmatrix}" + "&".join(["2^{2^{36}}"] * 9) + r"\end{pmatrix}}",
    "\\boxed{" + "(" * 140 + "6" + ")" * 140 + "}",
    "\\boxed{1e99999999999}",
    "\\boxed{" + "{" * 200_000,
    "\\boxed{" * 20_000 + "}" * 20_000,
    "<think></think>" * 100_000,
    "<" + "think" * 200_000,
    "<think " * 140_000,
    "\\" * 1_000_000,
    "\\boxed" + " " * 1_000_000,
    "\\boxed{x" + " " * 90_000 + "y}",
    "\\boxed{1" + "\\text{ab cd}" * 24 + "(}",
    "\\boxed{5\0}\0\0",
    "\\boxed{\ud800}",
    r"\boxed{__import__('os').system('touch pwned')}",
    "\\boxed{\\text{a " + "or " * 90 + "!}}",
    "\\boxed{5}\n[true]\n\\boxed{6}",
]
# Right answers that take sympy longer than others do.
SLOW_PAIRS = [
    (r"\frac{n(n+1)(2n+1)}{6}", r"\frac{2n^3+3n^2+n}{6}"),
    ("a^3+b^3+c^3-3abc", "(a+b+c)(a^2+b^2+c^2-ab-bc-ca)"),
    (r"\left[\frac{\pi^2}{8},\frac{5\pi^2}{4}\right]", r"[\frac18\pi^2,1.25\pi^2]"),
]


def children_cpu_seconds() -> float:
    usage = os.times()
    return usage.children_user + usage.children_system


@pytest.mark.parametrize("verifier", ["exact", "gsm8k", "math"])
def test_hostile_responses_get_0_and_the_others_their_reward(verifier, tmp_path):
    responses = [*HOSTILE_RESPONSES, r"\boxed{5}"]
    expected = [0.0] * len(HOSTILE_RESPONSES) + [float(verifier != "exact")]
    start = time.process_time()
    assert score(responses, ["5"] * len(responses), verifier) == expected
    # Children do what may take long. The trainer itself reads text, in time that grows
    # with its length: less than a second for these.
    assert time.process_time() - start < 10
    assert not (ROOT / "pwned").exists()


@pytest.mark.slow
def test_k_hostile_answers_cost_k_times_the_limit_of_cpu_time():
    towers = [f"\\boxed{{9^{{8^{{{n}}}}}}}" for n in (100, 101)]
    start = children_cpu_seconds()
    assert score(towers * 50, ["5"] * 100) == [0.0] * 100  # k is 2: each is asked once
    seconds = children_cpu_seconds() - start
    # The judge starts in 1 to 2 seconds. The system counts time in ticks.
    assert 1.8 * judge.LIMIT < seconds < 2 * judge.LIMIT + 5


def test_an_honest_pair_stays_far_below_the_limit():
    start = children_cpu_seconds()
    golds, answers = zip(*SLOW_PAIRS, strict=True)
    assert score(list(map(boxed, answers)), golds) == [1.0] * len(SLOW_PAIRS)
    # All of them and the start of the judge use less than a single pair may.
    assert children_cpu_seconds() - start < judge.LIMIT + 2


def test_a_verdict_does_not_depend_on_which_is_the_gold_answer():
    golds, answers, expected = zip(*verdicts_of(MATH)[::7], strict=True)
    assert score([boxed(gold) for gold in golds], answers) == list(expected)


def test_a_verdict_is_the_same_alone_and_in_any_batch(rewards):
    asked = [*rewards][::30]
    random.Random(0).shuffle(asked)
    batch = [*asked, *asked]

    def rewards_of(pairs):
        golds, answers = zip(*pairs, strict=True)
        return score([boxed(answer) for answer in answers], golds)

    assert rewards_of(batch) == [rewards[pair] for pair in batch]
    for pair in asked[:2]:
        assert rewards_of([pair]) == [rewards[pair]]


# --- the judge's process


def test_an_equal_pair_and_whole_numbers_need_no_judge(monkeypatch):
    monkeypatch.setattr(judge, "ROOT", ROOT / "tiny")  # where no judge can be started
    responses = [r"\boxed{\sqrt{2}}", r"\boxed{18}", r"\boxed{018}", r"\boxed{1}"]
    assert score(responses, [r"\sqrt{2}", "18", "18", "18"]) == [1.0, 1.0, 1.0, 0.0]
    split = Dataset([{"prompt": "", "answer": "y"}], [], "math")
    responses = [r"\boxed{y}", r"\boxed{x}"]
    sentence = r"^the verifier math fails on the response '\\\\boxed{x}' with the gold "
    with pytest.raises(Stopped, match=f"{sentence}answer 'y': formulas cannot be comp"):
        compute_rewards(split, [0], responses)


@pytest.mark.parametrize(
    "fault, said",
    [
        (
            "judge.equal = lambda gold, _: gold == '4' or os.kill(os.getpid(), 9)",
            "exit code -9",
        ),
        (
            "judge.equal = lambda gold, _: gold == '4' or os._exit(1)",
            "exit code 1",
        ),
        # MemoryError, or in Python 3.13 OSError: Cannot allocate memory.
        ("judge.MEMORY = 2**20", "emory"),
        (
            "judge.EQUAL_PAIRS = [('5', '6')]",
            "sympy does not find the pairs [('5', '6')]",
        ),
    ],
)
def test_a_judge_that_cannot_work_is_an_error_and_gives_no_verdict(fault, said):
    start = "import os, sys\nfrom answer_checking import judge\n"
    start += "judge.EQUAL_PAIRS = [('4', '4')]\n"
    end = "\nsys.argv[1:] = [str(os.getppid())]\njudge.main()"
    done = subprocess.run(
        [sys.executable, "-c", start + fault + end],
        cwd=ROOT,
        input='[["5", "x"]]',
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and done.stdout == "" and said in done.stderr


def running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_no_process_is_left_when_the_trainer_is_killed():
    # 20 towers need a minute of CPU time. The trainer itself ends with this test.
    towers = [f"\\boxed{{9^{{8^{{{n}}}}}}}" for n in range(100, 120)]
    code = (
        "import reward\n"
        "from answer_checking.judge import end_with\n"
        f"end_with({os.getpid()})\n"
        f"reward.score({towers!r}, ['5'] * 20)"
    )
    trainer = psutil.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    while len(family := trainer.children(recursive=True)) < 2:  # the judge and a child
        assert trainer.poll() is None
        time.sleep(0.02)
    trainer.kill()
    trainer.wait()
    end = time.monotonic() + 20
    while any(running(process) for process in family):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_scoring_loads_neither_torch_nor_sympy():
    code = (
        "import sys, reward\n"
        "assert reward.score(['\\\\boxed{5+0}'], ['5']) == [1.0]\n"
        "heavy = ('torch', 'sympy', 'transformers', 'datasets')\n"
        "assert not [name for name in heavy if name in sys.modules]"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
